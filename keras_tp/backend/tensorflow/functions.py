"""A `tf.function` of the user's own, such as the step of a custom loop."""

import functools
import threading
import weakref

import tensorflow as tf
from keras.src import tree
from keras.src.distribution.distribution_lib import distribution
from tensorflow.experimental import dtensor

from keras_tp.backend.tensorflow import boundary
from keras_tp.backend.tensorflow import errors
from keras_tp.backend.tensorflow import placement

# By function: the mesh that its variables lie on, and the axis of batches.
_meshes = weakref.WeakKeyDictionary()


class _Calls(threading.local):
    """What the call of a `tf.function` in this thread has found out."""

    depth = 0
    wanted = None


_calls = _Calls()


class _Attempt:
    """A call off the mesh; its error is none if it has to be on the mesh."""

    wanted = None

    def __enter__(self):
        _calls.depth += 1

    def __exit__(self, *unused):
        _calls.depth -= 1
        self.wanted, _calls.wanted = _calls.wanted, None
        # Not by the error's type: autograph may have made another one of it.
        return self.wanted is not None


class NeedsMeshError(Exception):
    """Ends the trace of a function off the mesh that needs to be on it."""


def hook_call(original):
    """A function that reads a split variable runs on the mesh.

    Which functions do is found out while one is traced for the first time:
    that trace ends, and the function is traced again, on the mesh.
    """

    @functools.wraps(original)
    def __call__(self, *args, **kwargs):
        if not tf.executing_eagerly() or placement.current_mesh() is not None:
            return original(self, *args, **kwargs)
        if self in _meshes:
            return _call_on_mesh(original, self, args, kwargs)
        attempt = _Attempt()
        with attempt:
            return original(self, *args, **kwargs)
        _meshes[self] = attempt.wanted
        return _call_on_mesh(original, self, args, kwargs)

    return __call__


def _call_on_mesh(original, function, args, kwargs):
    mesh, axis = _meshes[function]

    def placed(x):
        is_value = isinstance(x, tf.Tensor) or hasattr(x, "__array_interface__")
        return boundary.enter_mesh(x, mesh, axis) if is_value else x

    args, kwargs = tree.map_structure(placed, (args, kwargs))
    with placement.on_mesh(mesh, axis), errors.explained():
        outputs = original(function, *args, **kwargs)
    return tree.map_structure(boundary.leave_mesh, outputs)


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
    current = distribution()
    axis = None
    if current is not None and current.device_mesh.backend_mesh == mesh:
        axis = current.batch_dim_name
    _calls.wanted = mesh, axis
    raise NeedsMeshError(
        "A variable on the devices of a mesh is read in a `tf.function`, which "
        "is traced again, on the mesh."
    )
