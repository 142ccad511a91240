"""Trains a model on one device and under a distribution, alike."""

import collections
import functools
import math
import os

import keras
import numpy as np
import pytest

from integration_tests import zoo
from keras_tp import distribution
from keras_tp.backend import hooks

SEED = 1
STEPS = 5


def fitted(shape):
    """Returns the shape of a mesh, changed where the run asks for it.

    On torch a mesh holds all processes, two or four: the last axis takes what
    the others leave.
    """
    count = distribution.get_device_count()
    if keras.config.backend() != "torch" or count == 1:
        return shape
    batch = shape[0] if len(shape) == 2 and shape[0] < count else 1
    return (batch, count // batch) if len(shape) == 2 else (count,)


def shapes(*wanted, slow=()):
    """Parametrizes a test by `shape`: those wanted, each `fitted` one once."""
    marks = {fitted(shape): () for shape in wanted}
    for shape in slow:
        marks.setdefault(fitted(shape), pytest.mark.slow)
    return pytest.mark.parametrize(
        "shape",
        [
            pytest.param(shape, id="x".join(map(str, shape)), marks=mark)
            for shape, mark in marks.items()
        ],
    )


MESHES = shapes((1, 2), (1, 4), (2, 2), slow=[(2, 4)])


class Run(collections.namedtuple("Run", ["initial", "losses", "weights"])):
    """What training gave: dicts of path to array, and a loss for each step."""


def mesh(shape, axis_names=("batch", "model")):
    """Returns a mesh over the first devices; skips where there are too few."""
    count = math.prod(shape)
    devices = distribution.list_devices()
    if len(devices) < count:
        pytest.skip(f"a mesh of {shape} needs {count} devices")
    return distribution.DeviceMesh(shape, list(axis_names), devices[:count])


def mesh_devices(shape):
    """Returns the names of the devices of such a mesh."""
    return [str(device) for device in mesh(shape).devices.flatten()]


def own_folder(tmp_path):
    """Returns the folder in which this process writes what is plain.

    Several processes write one file of a split model, but each a plain one.
    """
    folder = tmp_path / f"process_{os.environ.get('RANK', '0')}"
    folder.mkdir(exist_ok=True)
    return folder


def model_parallel(layouts, shape, strict=True):
    """Returns a `ModelParallel`; strict, so that no pattern can be dead."""
    layout_map = distribution.LayoutMap(mesh(shape))
    layout_map.strict = strict
    for pattern, axes in layouts.items():
        layout_map[pattern] = axes
    return distribution.ModelParallel(layout_map=layout_map)


def build(case, seed=SEED):
    """Builds a model under whatever is set, from a fixed seed."""
    keras.utils.set_random_seed(seed)
    return case.build()


def data_of(case):
    return case.data(np.random.default_rng(3))


def weights_of(model):
    """Returns a dict of path to array, and checks that paths are unique."""
    values = {v.path: keras.ops.convert_to_numpy(v) for v in model.weights}
    assert len(values) == len(model.weights)
    return values


class SummedAdam(keras.optimizers.Adam):
    """Adam that is given the gradient of a table as one tensor.

    Plain Keras on TensorFlow hands it the parts of a row that was looked up
    twice, and Adam squares them one by one: its second moments are not those
    of the gradient. On JAX and torch, and on every mesh, they are.
    """

    def apply(self, grads, trainable_variables=None):
        grads = [keras.ops.reshape(grad, grad.shape) for grad in grads]
        super().apply(grads, trainable_variables)


def optimizer(name, case, adam=keras.optimizers.Adam):
    if name == "sgd":
        return keras.optimizers.SGD(case.sgd_rate)
    return adam(0.003)


def train(case, model, name, **kwargs):
    """Compiles a built model and trains it on one batch, `STEPS` times."""
    x, y = data_of(case)
    initial = weights_of(model)
    model.compile(optimizer(name, case, **kwargs), case.loss)
    history = model.fit(
        x,
        y,
        batch_size=zoo.BATCH,
        epochs=STEPS,
        shuffle=False,
        verbose=0,
    )
    return Run(initial, history.history["loss"], weights_of(model))


def assert_plain():
    """The reference is Keras's own: no distribution, no hook."""
    assert keras.distribution.distribution() is None
    assert not hooks.is_installed()


@functools.cache
def reference(name, optimizer_name):
    """Trains a model of the zoo on one device, once."""
    assert_plain()
    case = zoo.CASES[name]
    return train(case, build(case), optimizer_name, adam=SummedAdam)


def split_paths(model):
    """Returns the paths of the weights that the live arrays show as split."""
    return {
        row.path
        for row in distribution.describe(model).rows
        if row.role == "weight" and row.is_split
    }


def difference(a, b):
    """Returns the largest `|a - b| / max(1, |b|)`."""
    a, b = np.asarray(a, "float64"), np.asarray(b, "float64")
    assert a.shape == b.shape
    assert np.isfinite(a).all() and np.isfinite(b).all()
    return float(np.max(np.abs(a - b) / np.maximum(1.0, np.abs(b)), initial=0))


def differences(run, other):
    """Returns a dict of path to the `difference` of two runs' weights."""
    assert run.weights.keys() == other.weights.keys()
    return {
        path: difference(value, other.weights[path])
        for path, value in run.weights.items()
    }


def loss_difference(run, other):
    """Returns the largest relative difference of the losses."""
    a, b = np.array(run.losses), np.array(other.losses)
    assert a.shape == b.shape == (STEPS,)
    assert np.isfinite(b).all() and (b != 0).all()
    return float(np.max(np.abs(a - b) / np.abs(b)))


def log_measurement(*values):
    """Appends a line to the file that KERAS_TP_MEASUREMENTS names, if any."""
    path = os.environ.get("KERAS_TP_MEASUREMENTS")
    if path:
        with open(path, "a") as file:
            print(*values, sep="\t", file=file)
