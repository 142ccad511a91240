"""The benchmark, in its smallest size: it runs, and its sides agree.

The survey of plans is what its file says: that of all models on torch, where
it takes least, and that of some on the other backends.
"""

import json
import os
import pathlib
import shutil
import subprocess

import keras
import pytest

from integration_tests import launching

ROOT = pathlib.Path(__file__).parent.parent
RATIOS = {
    "jax": {
        "keras_tp / keras",
        "keras_tp / shard_map",
        "keras / shard_map",
        "keras, 1 device / jax, 1 device",
    },
    "tensorflow": {"keras_tp / dtensor by hand"},
    "torch": {
        "keras_tp / parallelize_module",
        "keras / torch",
        "keras_tp / keras",
        "parallelize_module / torch",
    },
}
ROUNDS = 2

pytestmark = pytest.mark.skipif(
    "RANK" in os.environ,
    reason="starts its own processes",
)


def run(script, *arguments):
    """Runs a script of the folder of benchmarks; returns what it prints."""
    return launching.output_of(f"benchmarks/{script}", *arguments)


def test_step_time(tmp_path):
    backend = keras.config.backend()
    output = run(
        *("step_time.py", "--backend", backend, "--devices", "2"),
        *("--hidden", "64", "--layers", "1", "--steps", "2"),
        *("--rounds", str(ROUNDS), "--json", str(tmp_path / "times.json")),
    )
    written = json.loads((tmp_path / "times.json").read_text())
    assert set(written["ratios"]) == RATIOS[backend]
    for seconds in written["seconds"].values():
        assert len(seconds) == ROUNDS and min(seconds) > 0
    for name, found in written["ratios"].items():
        low, high = found["interval"]
        assert low <= found["ratio"] <= high
        # Process 0 alone prints.
        assert output.count(f"{name}: ratio of medians") == 1


SMALL = ("--hidden", "64", "--layers", "1", "--steps", "2", "--rounds", "2")


@pytest.mark.skipif(keras.config.backend() != "torch", reason="of torch")
@pytest.mark.parametrize(
    ("script", "printed"),
    [
        ("data_parallel.py", "19 variables, ratio of medians"),
        ("input_gradients.py", "ms, processor: ratio of medians"),
        ("keras_over_torch.py", "all"),
    ],
)
def test_benchmarks_of_torch(script, printed):
    assert printed in run(script, *SMALL)


@pytest.mark.skipif(keras.config.backend() != "jax", reason="of JAX")
def test_programs():
    output = run(
        *("programs.py", "--devices", "2", "--hidden", "64", "--layers", "1")
    )
    for name in ("keras_tp", "shard_map", "keras, 1 device", "jax, 1 device"):
        assert output.count(f"{name} ") == 1


@pytest.mark.slow
@pytest.mark.skipif(keras.config.backend() != "jax", reason="of JAX")
def test_overlap():
    pytest.importorskip("jax_plugins.xla_cuda12")
    output = run("overlap.py", "--targets", "h100", "--ways", "tensor parallel")
    # Two blocks of four all-reduces; table, head and loss have the others.
    assert "12 of 13" in output


@pytest.mark.skipif(shutil.which("nvidia-smi"), reason="there is a GPU")
def test_the_gpu_script_without_a_gpu(tmp_path):
    done = subprocess.run(
        ["bash", "shell/gpu.sh", str(tmp_path / "figures")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "No CUDA device is here" in done.stdout
    assert not (tmp_path / "figures").exists()


def test_plan_large():
    """Llama's 70 B parameters: the column / row pairs, and no weight made."""
    one, several = map(json.loads, run("plan_large.py").splitlines())
    layers, width, length, item = 80, 8192, 4096, 2
    whole = (2 * layers + 1) * width
    share = (one["parameters"] - whole) // 8 + whole
    for found, replicas in ((one, 1), (several, 8)):
        assert found["backend"] == keras.config.backend()
        assert found["mesh"] == [replicas, 8]
        # All but the scales of the normalizations.
        assert found["split_share"] == 1
        memory = found["memory"]
        assert memory["parameters"] == memory["gradients"] == share * item
        assert memory["slots"] == 2 * share * item
        assert memory["activations"] > 0
        # Two pairs in each layer, the table and the head; the gradients.
        count, size = 4 * layers + 2, width * item * length * 8 // replicas
        gradients = (replicas > 1) * (9 * layers + 3)
        assert found["collectives"]["all_reduce"] == [
            count + gradients,
            count * size + (replicas > 1) * share * item,
        ]
        assert found["peak_mib"] * 2**20 <= 1.3e9


# Some of each kind: text, images, both and sound; made of others or not.
SURVEYED = ["BLIP2", "CSPNet", "FNet", "Gemma3n", "llama3", "SigLIP"]


@pytest.mark.parametrize("names", [SURVEYED, []], ids=["some", "all"])
def test_plan_survey(names):
    output = run("plan_survey.py", *names)
    expected = (ROOT / "benchmarks/plans.md").read_text()
    if names:
        rows = expected.splitlines(keepends=True)
        expected = "".join(
            row for row in rows if row.split(" | ")[0].strip("| ") in names
        )
        assert expected.count("\n") == len(names)
    assert output == expected


@pytest.mark.skipif(
    keras.config.backend() == "jax",
    reason="XLA for CPUs sums gradients of projections one by one",
)
def test_collectives_survey(tmp_path):
    arguments = "collectives_survey.py", "llama", "--folder", str(tmp_path)
    key = f"{keras.config.backend()}/2/llama"
    assert f"{key} equal" in run(*arguments)
    row = json.loads((tmp_path / "collectives_survey.json").read_text())[key]
    assert row["predicted"] == row["counted"]
    count, size = row["counted"]["all_reduce"]
    line = f"| llama | all-reduce | {count}: {size} | {count}: {size} | equal |"
    assert line in (tmp_path / "collectives.md").read_text()
    # A model that has a result is not counted again.
    assert run(*arguments) == ""
