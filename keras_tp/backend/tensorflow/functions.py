"""Runs a user's own `tf.function`, such as a custom step, on the mesh."""

import functools
import threading
import weakref

import tensorflow as tf
from keras.src import backend as keras_backend
from keras.src import tree
from keras.src.distribution.distribution_lib import distribution
from keras.src.distribution.distribution_lib import set_distribution

from keras_tp.backend.hooks import around
from keras_tp.backend.tensorflow import boundary
from keras_tp.backend.tensorflow import placement

# Maps a function to the mesh of its variables and the batch axis.
_meshes = weakref.WeakKeyDictionary()


class _Calls(threading.local):
    """State of the `tf.function` calls in this thread.

    `depth` counts nested calls. `wanted` is the mesh and the batch axis that a
    function has to run on. `model` is a model that has to be built and planned
    first, with its arguments. `prepare` is a function that has to run first.
    """

    depth = 0
    wanted = None
    model = None
    prepare = None


_calls = _Calls()


class NeedsMeshError(Exception):
    """Ends the trace of a function that has to be traced again."""


class _Attempt:
    """One call of a function; `NeedsMeshError` may end its trace.

    Args:
        depth: Int, 1 for a user's own function, and 0 for a step of Keras.
    """

    def __init__(self, depth):
        self._depth = depth

    def __enter__(self):
        _calls.depth += self._depth
        _calls.wanted = _calls.model = _calls.prepare = None

    def __exit__(self, *unused):
        _calls.depth -= self._depth
        self.wanted, self.model = _calls.wanted, _calls.model
        self.prepare = _calls.prepare
        _calls.wanted = _calls.model = _calls.prepare = None
        # Do not check the error's type: autograph may have replaced it.
        reasons = (self.wanted, self.model, self.prepare)
        return any(reason is not None for reason in reasons)


@around
def hook_call(original, self, /, *args, **kwargs):
    """Runs a function that reads a sharded variable on the mesh.

    The first trace of a function shows whether it does. If so, this trace
    ends, its model is built and planned, and the function is traced again, on
    the mesh. A function with a DTensor argument runs there at once.
    """
    if not tf.executing_eagerly():
        return original(self, *args, **kwargs)
    is_outermost = placement.is_outermost()
    if is_outermost and self not in _meshes:
        found = _mesh_of(args, kwargs)
        if found is not None:
            _meshes[self] = found
    while True:
        attempt = _Attempt(depth=int(is_outermost))
        with attempt:
            if not is_outermost or self not in _meshes:
                return original(self, *args, **kwargs)
            function = functools.partial(original, self)
            return boundary.call_on_mesh(
                *_meshes[self], function, args, kwargs, _is_value
            )
        # Reset the function to untraced. Otherwise TensorFlow would go on
        # with the unfinished trace.
        self._created_variables = None
        self._variable_creation_config = None
        self._no_variable_creation_config = None
        if attempt.wanted is not None:
            _meshes[self] = attempt.wanted
        if attempt.model is not None:
            prepare(*attempt.model)
        if attempt.prepare is not None:
            run_before(attempt.prepare)


def run_before(function):
    """Runs a function without arguments, off the mesh.

    In a trace, this ends the trace, which starts again afterwards.
    """
    if tf.executing_eagerly():
        with placement.off_mesh():
            function()
        return
    _calls.prepare = function
    raise NeedsMeshError(
        "State is moved to the devices of a mesh, and the function is traced "
        "again."
    )


def note_model(model, args, kwargs):
    """Ends the trace of a function that calls a model too early.

    Building the model creates variables, and planning it moves them. The
    function would go on with the variables that it has read before.
    """
    if not _calls.depth or tf.executing_eagerly():
        return
    if _own_distribution(model) is not None and not _is_ready(model):
        _calls.model = model, args, kwargs
        raise NeedsMeshError(f"Model {model.name!r} is built first.")


def _own_distribution(model):
    return vars(model).get("_made_under") or distribution()


def is_built(model):
    """Returns whether all layers of a model are built."""
    return all(layer.built for layer in model._flatten_layers())


def _is_ready(model):
    if model in _prepared:
        return True
    return is_built(model) and not any(
        getattr(variable, "_awaits_plan", False) for variable in model.weights
    )


def prepare(model, args, kwargs):
    """Builds a model for its arguments and applies its sharding plan.

    A trace cannot create variables on the devices.
    """
    _prepared.add(model)
    before = distribution()
    set_distribution(_own_distribution(model))
    try:
        if not is_built(model):
            args, kwargs = tree.map_structure(boundary.symbolic, (args, kwargs))
            keras_backend.compute_output_spec(model.__call__, *args, **kwargs)
    finally:
        set_distribution(before)
    for variable in model.variables:
        # The first read of a value applies the plan.
        _ = variable.value


# Models that `prepare` has built and planned.
_prepared = weakref.WeakSet()


def _is_value(x):
    return isinstance(x, tf.Tensor) or hasattr(x, "__array_interface__")


def _mesh_of(args, kwargs):
    """Returns the mesh and the batch axis of the first DTensor argument."""
    for x in tree.flatten((args, kwargs)):
        if isinstance(x, tf.Tensor) and placement.is_dtensor(x):
            return _mesh_and_batch_axis(x)
    return None


def _mesh_and_batch_axis(x):
    mesh, current = placement.layout_of(x).mesh, distribution()
    if current is None or current.device_mesh.backend_mesh != mesh:
        return mesh, None
    return mesh, current.batch_dim_name


def check_captured(tensor):
    """Ends the trace of a user's own function that captures a DTensor."""
    if not _calls.depth or not placement.is_dtensor(tensor):
        return
    _calls.wanted = _mesh_and_batch_axis(tensor)
    raise NeedsMeshError(
        "A variable on the devices of a mesh is read in a `tf.function`, which "
        "is traced again, on the mesh."
    )
