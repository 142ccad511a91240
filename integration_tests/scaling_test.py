"""The law that `benchmarks/scaling.py` scales train steps with."""

import importlib.util
import pathlib
import xml.etree.ElementTree

import pytest

from keras_tp.distribution import accelerators

FOLDER = pathlib.Path(__file__).parent.parent / "benchmarks"
H100 = accelerators.accelerator("h100")
# Bytes of results on one device: those of a tensor of 800 bytes on 8 devices.
RESULTS = {"all_reduce": 800, "all_gather": 800, "reduce_scatter": 100}


def load(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


law = load("scaling_law")


def collectives(**nbytes):
    return {kind: (1, size) for kind, size in nbytes.items()}


@pytest.mark.parametrize("kind", RESULTS)
def test_bytes_of_a_ring(kind):
    times = 2 if kind == "all_reduce" else 1
    sent = law.bytes_sent(H100, collectives(**{kind: RESULTS[kind]}), 8)
    assert sent == pytest.approx(times * 7 / 8 * 800)


def test_one_device_sends_nothing():
    for kind, size in RESULTS.items():
        assert law.bytes_sent(H100, collectives(**{kind: size}), 1) == 0
    found = {axis: collectives(all_reduce=800) for axis in ("data", "model")}
    step = law.step(H100, (1, 1), found, 1e12, 0.5, False)
    assert step["sent"] == {"model": 0, "data": 0}
    assert step["efficiency"] == step["efficiency_hidden"] == 1


def test_more_replicas_do_not_change_what_the_model_axis_sends():
    found = {axis: collectives(all_reduce=2**30) for axis in ("data", "model")}
    steps = [
        law.step(H100, (replicas, 8), found, 1e14, 0.5, False)
        for replicas in (2, 4, 8)
    ]
    for axis, same in (("model", True), ("data", False)):
        assert (len({step["sent"][axis] for step in steps}) == 1) is same
    assert len({step["seconds"]["model"] for step in steps}) == 1
    shares = [step["efficiency"] for step in steps]
    assert shares == sorted(shares, reverse=True) and shares[0] > shares[-1]
    assert all(s["efficiency_hidden"] >= s["efficiency"] for s in steps)


def test_what_is_hidden():
    """The data axis, behind two thirds of the step; with FSDP, behind all."""
    found = {"model": {}, "data": collectives(all_reduce=100e9)}
    # 100 GB at 2 / 2 of 50 GB/s take 2 s.
    args = H100, (2, 8), found, 0.5 * 989.4e12 * 2.4, 0.5
    plain, fully = law.step(*args, False), law.step(*args, True)
    assert plain["seconds"]["data"] == pytest.approx(2)
    assert plain["efficiency"] == pytest.approx(2.4 / 4.4)
    assert plain["efficiency_hidden"] == pytest.approx(2.4 / 2.8)
    assert fully["efficiency_hidden"] == 1


def test_flops():
    # One kernel of 10 elements and two matrices of attention, forward and
    # backward; two FLOPs for each product.
    kernels = 3 * 2 * 10 * 100
    attention = 3 * 2 * (2 * 5 * 20 * 20) * 5
    assert law.train_flops(10, 100, 1, 5, 20) == kernels + attention


def test_a_plot_is_an_svg():
    rows = [
        {
            "model": "<model>",
            "way": way,
            "devices": count,
            "efficiency": 0.5 / count,
            "efficiency_hidden": 1 / count,
        }
        for way in ("one", "the same")
        for count in (8, 16)
    ]
    text = load("scaling_plot").draw(rows)
    root = xml.etree.ElementTree.fromstring(text)
    assert root.tag.endswith("svg")
    # Ways with the same figures share a line, beside that of the legend.
    assert text.count("<polyline") == 2 + 1
    assert "one; the same" in text
