"""With the same layouts, the compiled step is that of plain Keras."""

import hashlib
import re

import keras
import numpy as np
import pytest

import keras_tp
from integration_tests import combinations
from keras_tp import distribution as dist

pytestmark = pytest.mark.skipif(
    keras.config.backend() != "jax", reason="HLO is what JAX compiles to"
)

CASES = {
    "pair": (combinations.mlp, combinations.PAIR),
    "heads": (combinations.attention, combinations.HEADS),
    "output": (
        combinations.mlp,
        {**combinations.PAIR, ".*up/output": ("batch", None)},
    ),
    "nothing split": (combinations.convolution, {}),
}


def step_hlo(library, build, patterns, shape, uneven=False):
    """The optimised HLO of the train step, without what names source lines."""
    from keras_tp.backend.jax import collective_counter

    keras.utils.set_random_seed(0)
    devices = library.list_devices()[: int(np.prod(shape))]
    mesh = library.DeviceMesh(shape, ["batch", "model"], devices)
    layout_map = library.LayoutMap(mesh)
    for pattern, axes in patterns.items():
        layout_map[pattern] = axes
    with library.ModelParallel(layout_map=layout_map).scope():
        model = build()
        model.compile(keras.optimizers.Adam(1e-3), "mse", metrics=["mae"])
        x = np.zeros((8, *model.input_shape[1:]), "float32")
        y = np.zeros((8, *model.output_shape[1:]), "float32")
        compiled = collective_counter.compile_step(model, x, y)
    text = re.sub(r", metadata=\{[^}]*\}", "", compiled.as_text())
    # Tables of files and lines that metadata refers to.
    return re.sub(
        r"^(FileNames|FunctionNames|FileLocations|StackFrames)\n(.+\n)*",
        "",
        text,
        flags=re.MULTILINE,
    )


def dataflow(text):
    """Returns a digest of a program, whatever the names and the order in it.

    XLA may name instructions, and list independent ones, in another way if it
    has removed constraints that change nothing.
    """
    digests, computation, result = {}, None, None
    for line in text.splitlines():
        named = re.match(r"\s*(ROOT )?(%[\w.-]+) = (.*)", line)
        if named:
            is_root, name, instruction = named.groups()
            # Operands and computations stand before what uses them.
            expanded = re.sub(
                r"%[\w.-]+", lambda m: digests[m.group()], instruction
            )
            digest = hashlib.sha256(expanded.encode()).hexdigest()
            digests[name] = digest
            result = digest if is_root else result
        elif line.endswith("{"):
            computation = re.search(r"%[\w.-]+", line).group()
        elif line == "}":
            digests[computation] = result
    return result


@pytest.mark.parametrize("shape", [(1, 4), (2, 2)])
@pytest.mark.parametrize("case", CASES)
def test_train_step_is_that_of_plain_keras(case, shape):
    build, patterns = CASES[case]
    plain = step_hlo(keras.distribution, build, patterns, shape)
    # No name of a variable or layer is part of the program.
    keras.utils.clear_session()
    keras_tp.install()
    ours = step_hlo(dist, build, patterns, shape)
    assert len(plain) > 1000
    assert ours == plain or dataflow(ours) == dataflow(plain)


def test_another_layout_is_another_program():
    build, patterns = CASES["pair"]
    one = step_hlo(dist, build, patterns, (1, 4))
    other = step_hlo(dist, build, {".*up/kernel": ("model", None)}, (1, 2))
    assert one != other
    assert dataflow(one) != dataflow(other)
    assert dataflow(one) == dataflow(re.sub(r"%(\w)", r"%a_\1", one))
