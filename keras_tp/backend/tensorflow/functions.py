"""A `tf.function` of the user's own, such as the step of a custom loop."""

import functools
import threading
import weakref

import tensorflow as tf
from keras.src import backend as keras_backend
from keras.src import tree
from keras.src.distribution.distribution_lib import distribution
from keras.src.distribution.distribution_lib import set_distribution
from tensorflow.experimental import dtensor

from keras_tp.backend.tensorflow import boundary
from keras_tp.backend.tensorflow import errors
from keras_tp.backend.tensorflow import placement

# By function: the mesh that its variables lie on, and the axis of batches.
_meshes = weakref.WeakKeyDictionary()


class _Calls(threading.local):
    """What the call of a `tf.function` in this thread has found out.

    `wanted` is the mesh, and the axis of batches, that it has to run on;
    `model` a model that has to be built and planned first, with the arguments
    that it is given.
    """

    depth = 0
    wanted = None
    model = None


_calls = _Calls()


class NeedsMeshError(Exception):
    """Ends the trace of a function that has to be traced again."""


class _Attempt:
    """A call of a function, whose trace may be ended by `NeedsMeshError`."""

    again = False

    def __enter__(self):
        _calls.depth += 1
        _calls.wanted = _calls.model = None

    def __exit__(self, *unused):
        _calls.depth -= 1
        self.wanted, self.model = _calls.wanted, _calls.model
        _calls.wanted = _calls.model = None
        # Not by the error's type: autograph may have made another one of it.
        self.again = self.wanted is not None or self.model is not None
        return self.again


def hook_call(original):
    """A function that reads a split variable runs on the mesh.

    Which functions do is found out while one is traced for the first time:
    that trace ends, its model is built and planned, and the function is traced
    again, on the mesh. A function that is given a DTensor runs there at once.
    """

    @functools.wraps(original)
    def __call__(self, *args, **kwargs):
        if not tf.executing_eagerly() or placement.current_mesh() is not None:
            return original(self, *args, **kwargs)
        if self not in _meshes:
            found = _mesh_of(args, kwargs)
            if found is not None:
                _meshes[self] = found
        while True:
            attempt = _Attempt()
            with attempt:
                if self in _meshes:
                    return _call_on_mesh(original, self, args, kwargs)
                return original(self, *args, **kwargs)
            # As if it had never been traced: otherwise TensorFlow goes on with
            # a trace that has not come to its end.
            self._created_variables = None
            self._variable_creation_config = None
            self._no_variable_creation_config = None
            if attempt.wanted is not None:
                _meshes[self] = attempt.wanted
            if attempt.model is not None:
                _prepare(*attempt.model)

    return __call__


def note_model(model, args, kwargs):
    """Ends the trace of a function that calls a model too early.

    The model would have variables only from here on, or they would move later:
    the function would go on with those that it has read.
    """
    if not _calls.depth or tf.executing_eagerly():
        return
    if _own_distribution(model) is not None and not _is_ready(model):
        _calls.model = model, args, kwargs
        raise NeedsMeshError(f"Model {model.name!r} is built first.")


def _own_distribution(model):
    return vars(model).get("_made_under") or distribution()


def _is_ready(model):
    if model in _prepared:
        return True
    return all(layer.built for layer in model._flatten_layers()) and not any(
        getattr(variable, "_awaits_plan", False) for variable in model.weights
    )


def _prepare(model, args, kwargs):
    """Builds a model for its arguments, and has it planned."""
    _prepared.add(model)
    before = distribution()
    set_distribution(_own_distribution(model))
    try:
        if not all(layer.built for layer in model._flatten_layers()):
            args, kwargs = tree.map_structure(_symbolic, (args, kwargs))
            keras_backend.compute_output_spec(model.__call__, *args, **kwargs)
    finally:
        set_distribution(before)
    for variable in model.weights:
        # As a loop of the user's own that reads it does.
        _ = variable.value


def _symbolic(x):
    if not isinstance(x, tf.Tensor):
        return x
    dtype = keras_backend.standardize_dtype(x.dtype)
    return keras_backend.KerasTensor(x.shape, dtype)


# Models that were built and planned for a function.
_prepared = weakref.WeakSet()


def _call_on_mesh(original, function, args, kwargs):
    mesh, axis = _meshes[function]

    def placed(x):
        is_value = isinstance(x, tf.Tensor) or hasattr(x, "__array_interface__")
        return boundary.enter_mesh(x, mesh, axis) if is_value else x

    args, kwargs = tree.map_structure(placed, (args, kwargs))
    with placement.on_mesh(mesh, axis), errors.explained():
        outputs = original(function, *args, **kwargs)
    return tree.map_structure(boundary.leave_mesh, outputs)


def _mesh_of(args, kwargs):
    """Returns the mesh, and the batch axis, of a DTensor among arguments."""
    for x in tree.flatten((args, kwargs)):
        if isinstance(x, tf.Tensor) and placement.is_dtensor(x):
            mesh = dtensor.fetch_layout(x).mesh
            return mesh, _batch_axis(mesh)
    return None


def _batch_axis(mesh):
    current = distribution()
    if current is None or current.device_mesh.backend_mesh != mesh:
        return None
    return current.batch_dim_name


def check_captured(tensor):
    """Ends the trace of a function of the user's own that captures a DTensor.

    Args:
        tensor: Eager tensor that is captured off the mesh.
    """
    if not _calls.depth:
        return
    with tf.init_scope():
        if not placement.is_dtensor(tensor):
            return
        mesh = dtensor.fetch_layout(tensor).mesh
    _calls.wanted = mesh, _batch_axis(mesh)
    raise NeedsMeshError(
        "A variable on the devices of a mesh is read in a `tf.function`, which "
        "is traced again, on the mesh."
    )
