"""Every layer and loss of Keras, split, as on one device.

A layer is trained behind a `Dense` whose outputs are split, with its own
weights split along each of their dims in turn. CI tries a slice of them,
`KERAS_TP_SLOW=1` all.
"""

import os
import re
import zlib

import keras
import numpy as np
import pytest

from integration_tests import harness
from integration_tests import ops_cases
from integration_tests import ops_layers
from integration_tests import ops_listed
from integration_tests import ops_test
from keras_tp import distribution

BACKEND = keras.config.backend()
SLOW = os.environ.get("KERAS_TP_SLOW") == "1"
# One of so many is tried in CI.
STRIDE = {"jax": 48, "tensorflow": 48, "torch": 12}[BACKEND]
STEPS = 2


def _slice(names):
    return [
        name
        for name in sorted(names)
        if SLOW or zlib.crc32(name.encode()) % STRIDE == 0
    ]


def _model(name):
    keras.utils.set_random_seed(1)
    model = ops_layers.model(name)
    rng = np.random.default_rng(3)
    for variable in model.trainable_variables:
        # Biases are zero otherwise, and scales one.
        noise = rng.uniform(0.1, 0.3, variable.shape).astype("float32")
        variable.assign(keras.ops.convert_to_numpy(variable) + noise)
    return model


def _train(model):
    rng = np.random.default_rng(2)
    shape = (4, *model.input_shape[1:])
    if model.inputs[0].dtype == "int32":
        x = rng.integers(0, 12, shape).astype("int32")
    else:
        x = rng.uniform(0.2, 1.2, shape).astype("float32")
    before = model.predict(x, batch_size=4, verbose=0)
    y = rng.normal(size=before.shape).astype("float32")
    model.compile(keras.optimizers.SGD(0.05), "mse")
    losses = [float(model.train_on_batch(x, y)) for _ in range(STEPS)]
    # Read in the same order in every process.
    weights = [
        np.asarray(keras.ops.convert_to_numpy(v)) for v in model.variables
    ]
    return [np.array(losses), before, *weights]


def _layouts(model):
    """Returns dicts of path to axes: dims of weights, each split in one."""
    found = []
    rank = max((len(v.shape) for v in model.trainable_variables), default=1)
    for turn in range(rank):
        layouts = {}
        for variable in model.trainable_variables:
            shape = variable.shape
            dims = [d for d, size in enumerate(shape) if size % 2 == 0]
            if variable.path.endswith("up/kernel"):
                # The layer's inputs are split along their last dim.
                dims = [1] if shape[1] % 2 == 0 else []
            if dims:
                dim = dims[turn % len(dims)]
                axes = [None] * len(shape)
                axes[dim] = "model"
                path = f"^{re.escape(variable.path)}$"
                layouts[path] = tuple(axes)
        if layouts and layouts not in found:
            found.append(layouts)
    return found


def _compare(got, expected, what):
    assert len(got) == len(expected)
    for a, b in zip(got, expected):
        scale = np.max(np.abs(b), initial=1)
        np.testing.assert_allclose(
            a, b, rtol=1e-4, atol=2e-5 * scale, err_msg=what
        )


@pytest.mark.parametrize(
    "name", _slice([*ops_layers.TRAINED, *ops_layers.OF_IDS])
)
def test_a_layer_trains_as_on_one_device(name):
    plain = _model(name)
    layouts = _layouts(plain)
    expected = _train(plain)
    mesh = harness.mesh((1, 2))
    refused = []
    for axes in [*layouts, None]:
        keras.utils.clear_session()
        layout_map = distribution.LayoutMap(mesh)
        for path, split in (axes or {}).items():
            layout_map[path] = split
        if axes is None:
            parallel = distribution.TensorParallel(mesh, "batch")
        else:
            parallel = distribution.ModelParallel(layout_map=layout_map)
        with parallel.scope():
            try:
                got = _train(_model(name))
            except NotImplementedError as e:
                assert "Received: " in str(e)
                refused.append((axes, str(e)))
                continue
        _compare(got, expected, f"{name} split as {axes}")
    is_listed = ops_listed.reason(ops_listed.REFUSED, BACKEND, f"layers.{name}")
    assert bool(refused) == bool(is_listed), refused


def _called(name):
    """Returns the cases of a layer that is called with values."""
    if name in ops_layers.CALLED:
        make, value = ops_layers.CALLED[name]
    else:
        make, value = ops_layers.IMAGES_CHANGED[name], ops_layers.COLORS

    def call(x):
        # A new one each time: its random state is as it was.
        return make()(x, training=True)

    return [ops_cases.Case(f"layers.{name}", call, [value], True)]


@pytest.mark.parametrize(
    "name", _slice([*ops_layers.CALLED, *ops_layers.IMAGES_CHANGED])
)
def test_a_layer_that_is_called(name):
    found = ops_test.outcomes_of(f"layers.{name}", _called(name))
    ops_test.check(f"layers.{name}", found)


@pytest.mark.parametrize("name", _slice(ops_layers.LOSSES))
def test_a_loss(name, request):
    make = getattr(keras.losses, name)

    def loss(y_true, y_pred):
        return make()(y_true, y_pred)

    case = ops_cases.Case(
        f"losses.{name}", loss, list(ops_layers.LOSSES[name]), True
    )
    name = f"losses.{name}"
    is_open = ops_listed.reason(ops_listed.OPEN, BACKEND, name)
    if is_open is not None:
        request.applymarker(pytest.mark.xfail(reason=is_open, strict=True))
    ops_test.check(name, ops_test.outcomes_of(name, [case]))


def test_every_layer_and_loss_has_a_place():
    not_tried = {n for names in ops_layers.NOT_TRIED.values() for n in names}
    layers = {
        *ops_layers.TRAINED,
        *ops_layers.OF_IDS,
        *ops_layers.CALLED,
        *ops_layers.IMAGES_CHANGED,
        *not_tried,
    }
    assert layers == set(ops_layers.public_layers())
    assert set(ops_layers.LOSSES) == set(ops_layers.public_losses())
