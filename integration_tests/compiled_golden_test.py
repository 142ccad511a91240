"""Sharding and collectives of small models, compiled for H100 and TPU v5e.

They are compared with `golden/compiled.json`. To write it again, with all
models, in an environment with `pip install '.[jax,hub,ahead]'`:

    KERAS_TP_UPDATE_GOLDEN=1 KERAS_TP_SLOW=1 KERAS_BACKEND=jax \\
        python -m pytest integration_tests/compiled_golden_test.py

Look at its diff.
"""

import importlib.metadata
import json
import os
import pathlib

import keras
import pytest

from integration_tests import compile_for_test
from integration_tests import hub_backbones
from integration_tests import hub_models
from keras_tp import distribution

GOLDEN = pathlib.Path(__file__).parent / "golden" / "compiled.json"
BATCH, DEVICES = 8, 4
# TPUs take longer to compile for.
MODELS = {
    "h100": ("llama", "gpt2", "gemma2", "bert", "mixtral", "vit"),
    "v5e": ("llama",),
}
COMPILERS = {"h100": "jax-cuda12-plugin", "v5e": "libtpu"}

pytestmark = compile_for_test.on_jax


def row_of(name, target):
    """Compiles a step; returns its layouts and what it communicates."""
    devices = [f"gpu:{i}" for i in range(DEVICES)]
    mesh = distribution.DeviceMesh((1, DEVICES), ["batch", "model"], devices)

    def build():
        model = hub_models.MODELS[name]()
        hub_backbones.compile_model(model)
        return model

    # Layers without a name are numbered: the plan and the model alike.
    keras.utils.clear_session()
    plan = distribution.plan_sharding(build, mesh)
    keras.utils.clear_session()
    report = distribution.compile_for(
        build,
        distribution.TensorParallel(plan=plan),
        target,
        batch_size=BATCH,
        sequence_length=hub_models.LENGTH,
    )
    return {
        "sharding": {row.path: list(row.axes) for row in plan.variables},
        "collectives": {
            kind: [row["count"], row["bytes"]]
            for kind, row in sorted(report.collectives.items())
        },
        "memory": report.memory["arguments"],
        "compiler": importlib.metadata.version(COMPILERS[target]),
    }


def cases():
    """One model for each target; the others are slow."""
    for target, names in MODELS.items():
        for index, name in enumerate(names):
            case = compile_for_test.needed(target)
            marks = [*case.marks, *[pytest.mark.slow] * bool(index)]
            yield pytest.param(name, target, marks=marks)


@pytest.mark.parametrize(("name", "target"), cases())
def test_a_model_is_compiled_as_before(name, target):
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    found = row_of(name, target)
    if os.environ.get("KERAS_TP_UPDATE_GOLDEN"):
        golden[f"{name}/{target}"] = found
        lines = [
            f"{json.dumps(key)}: {json.dumps(golden[key])}"
            for key in sorted(golden)
        ]
        GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    assert found == golden[f"{name}/{target}"]
