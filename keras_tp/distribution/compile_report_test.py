import json

import pytest

from integration_tests import html_pages
from keras_tp.backend.program_steps import COMPUTE
from keras_tp.backend.program_steps import DONE
from keras_tp.backend.program_steps import Step
from keras_tp.distribution import compiled_step
from keras_tp.distribution.accelerators import Accelerator
from keras_tp.distribution.accelerators import accelerator
from keras_tp.distribution.compile_report import CompileReport

# One second for a FLOP, a byte read and a byte sent.
SLOW = Accelerator(
    name="slow",
    title="Slow",
    device_type="gpu",
    memory=100,
    memory_speed=1,
    flops={"bf16": 1},
    link_speed=1,
    node_size=4,
    network_speed=0.5,
    source="made up",
)
PAIR = (0, 1)
MEMORY = {
    "arguments": 60,
    "outputs": 60,
    "aliased": 60,
    "temporaries": 30,
    "peak": 90,
}


def matmul(flops, nbytes=0, **kwargs):
    return Step("dot", COMPUTE, flops={"bf16": flops}, bytes=nbytes, **kwargs)


def reduced(nbytes, is_started=False, devices=PAIR, times=1):
    return Step(
        "sum",
        "all_reduce",
        times,
        bytes=nbytes,
        tensors=1,
        devices=devices,
        is_started=is_started,
    )


def figures(*steps):
    return compiled_step.figures(steps, MEMORY, SLOW)


def test_a_computation_takes_the_longer_of_its_flops_and_its_bytes():
    found = figures(matmul(5, 2), matmul(3, 7))
    assert found["seconds"]["compute"] == 5 + 7
    assert found["seconds"]["matmul"] == 5 + 3
    assert found["seconds"]["step"] == 12
    assert found["flops"] == {"bf16": 8}
    assert found["bytes"] == 9


@pytest.mark.parametrize(
    ["kind", "seconds"],
    [
        ("all_reduce", 2 * 3 / 4 * 8),
        ("all_gather", 3 / 4 * 8),
        ("reduce_scatter", 3 * 8),
        ("all_to_all", 3 / 4 * 8),
        ("collective_permute", 8),
    ],
)
def test_collectives_send_what_rings_send(kind, seconds):
    assert SLOW.send_seconds(kind, 8, (0, 1, 2, 3)) == seconds


def test_devices_of_several_nodes_send_over_the_network():
    assert SLOW.send_seconds("all_reduce", 8, (3, 4)) == 8 / 0.5
    assert SLOW.send_seconds("all_reduce", 8, (4, 5)) == 8


def test_the_speed_of_a_group():
    h100 = accelerator("h100")
    # Inside of a node of 8, its links.
    assert h100.ring_speed(range(8)) == h100.ring_speed((0, 4)) == 450e9
    # Between nodes, the port of each member in a node.
    assert h100.ring_speed((0, 8)) == h100.ring_speed(range(0, 512, 8)) == 50e9
    assert h100.ring_speed(range(0, 64, 4)) == 100e9
    assert h100.ring_speed(range(64)) == 400e9


def test_a_collective_that_nothing_runs_beside_is_not_hidden():
    found = figures(matmul(5), reduced(4), matmul(2))
    row = found["collectives"]["all_reduce"]
    assert (row["seconds"], row["hidden_seconds"]) == (4, 0)
    assert found["seconds"]["exposed"] == 4
    assert found["seconds"]["step"] == 11


def test_computations_between_start_and_end_hide_a_collective():
    found = figures(
        reduced(4, is_started=True), matmul(3), Step("sum", DONE), matmul(1)
    )
    row = found["collectives"]["all_reduce"]
    assert row["beside"] == 1
    assert row["hidden_seconds"] == 3
    assert found["seconds"]["exposed"] == 1
    assert found["seconds"]["step"] == 5


def test_two_collectives_share_the_links():
    one = reduced(4, is_started=True)._replace(name="one")
    two = reduced(4, is_started=True)._replace(name="two")
    found = figures(one, two, matmul(5), Step("one", DONE), Step("two", DONE))
    assert found["seconds"]["communication"] == 8
    assert found["seconds"]["exposed"] == 3


def test_loops_count_each_trip():
    found = figures(reduced(4, times=3), matmul(5, times=3))
    assert found["collectives"]["all_reduce"]["count"] == 3
    assert found["collectives"]["all_reduce"]["bytes"] == 12
    assert found["seconds"]["step"] == 3 * 9


def test_the_law_is_linear_and_knows_what_one_depth_lacks():
    gathered = reduced(8)._replace(kind="all_gather")
    shallow = figures(matmul(5), reduced(4))
    deep = figures(*[matmul(5), reduced(4)] * 2, gathered)
    found = compiled_step.at_depth(5, (1, shallow), (2, deep))
    assert found["flops"] == {"bf16": 25}
    assert found["collectives"]["all_reduce"]["count"] == 5
    assert found["collectives"]["all_gather"]["count"] == 4
    assert found["memory"] == MEMORY
    assert compiled_step.at_depth(2, (1, shallow), (2, deep)) == {
        **deep,
        "collectives": {
            kind: deep["collectives"][kind]
            for kind in ("all_reduce", "all_gather")
        },
    }


@pytest.fixture
def report():
    steps = (matmul(5), reduced(4), matmul(1, kernel="cuDNN"))
    return CompileReport(
        "model", SLOW, {"batch": 1, "model": 2}, 8, 16, {None: figures(*steps)}
    )


def test_text_says_what_matters(report):
    text = " ".join(str(report).split())
    assert "model on 2 x Slow" in text
    assert "batch 8 x 16" in text
    assert "fits in 0.0 GiB" in text
    assert "cuDNN x 1" in text
    assert "all_reduce" in text
    assert "made up" in text
    assert f"{4 / 10:.1%} of the step" in text


@pytest.mark.parametrize("width", [80, 120])
def test_the_text_is_as_wide_as_the_terminal(report, width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    report.collectives["collective_permute"] = {
        **report.collectives["all_reduce"],
        **{"count": 1234, "operations": 1234, "beside": 1234},
    }
    lines = str(report).splitlines()
    assert max(map(len, lines)) == width
    # No word is broken.
    words = str(report).split()
    for word in ("collective", "operations", "all_reduce"):
        assert word in words
    assert "collective_permute" in words


def test_a_step_that_is_too_large_does_not_fit(report):
    assert report.fits
    report.memory_limit = 89
    assert not report.fits
    assert "does not fit" in report.verdict()


def test_json_and_html(report, tmp_path):
    found = json.loads(report.to_json())
    assert found["collectives"]["all_reduce"]["count"] == 1
    assert found["fits"] is True
    assert found["accelerator"]["source"] == "made up"
    report.to_html(tmp_path / "report.html")
    page = html_pages.Page((tmp_path / "report.html").read_text())
    assert "waits for communication in 40% of the step" in page.text
    assert "all-reduce" in page.text and "run beside" in page.text
    widths = {
        tag["data-part"]: tag["width"]
        for _, tag in page.attributes
        if "data-part" in tag and "width" in tag
    }
    # Of a memory of 100 bytes, and of a step of 10 seconds.
    assert widths["arguments"] == "60.000%"
    assert widths["temporaries"] == "30.000%"
    assert widths["waiting"] == "40.000%"


def test_a_notebook_shows_a_piece_of_the_page(report):
    page = html_pages.Page(report._repr_html_())
    assert "model on 2 x Slow" in page.text
    report.memory_limit = 89
    page = html_pages.Page(report._repr_html_())
    # First of all, that it does not fit.
    assert page.classes.index("problem") < page.classes.index("bar")
    assert "The step does not fit in" in page.text
    assert "over" in page.classes


def test_a_report_of_one_model_has_no_law(report):
    assert report.compiled_depths == ()
    with pytest.raises(ValueError, match="Pass `depth`"):
        report.at_depth(3)


def test_reports_of_other_depths_follow_from_the_same_law():
    compiled = {
        depth: figures(*[matmul(5), reduced(4)] * depth) for depth in (2, 4)
    }
    made = CompileReport("model", SLOW, {"model": 2}, 8, None, compiled, 9)
    assert made.collectives["all_reduce"]["count"] == 9
    assert made.collectives_per_layer() == {"all_reduce": 1}
    assert made.at_depth(3).collectives["all_reduce"]["count"] == 3
    assert "2 and 4 layers" in str(made)


def test_published_figures():
    found = accelerator("v5e")
    # 400 GB/s in both directions over four links, of which a ring uses two.
    assert found.link_speed == 100e9
    assert found.peak_flops("bf16") == found.peak_flops("f32") == 197e12
    assert accelerator("h100").peak_flops("f32") == 494.7e12
    with pytest.raises(ValueError, match="must be one of"):
        accelerator("h1000")
