"""Builds models that hold no values and leave no trace."""

import contextlib
import random

import keras
import numpy as np
from keras.src.backend.common import global_state
from keras.src.backend.common.variables import Variable as KerasVariable
from keras.src.layers.layer import Layer


@contextlib.contextmanager
def built_without_weights(build_fn):
    """Gives the model of a function, which has no values, and discards it.

    Name counters, random state and global state are as before.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(no_trace_left())
        scope = keras.StatelessScope(initialize_variables=False)
        stack.enter_context(scope)
        stack.enter_context(initial_values_put_off())
        # On torch, quantization collects the parameters of a layer again. Here
        # a layer has none.
        if hasattr(Layer, "_track_variables"):
            Layer._track_variables = lambda layer: None
            stack.callback(delattr, Layer, "_track_variables")
        yield build_fn()


@contextlib.contextmanager
def initial_values_put_off():
    """Allows variables that are made from a value, such as an optimizer's.

    In a stateless scope, Keras accepts only initializers.
    """
    original = KerasVariable.__init__

    def __init__(self, initializer, shape=None, dtype=None, **kwargs):
        if not callable(initializer) and not isinstance(initializer, str):
            value = np.asarray(initializer)
            if dtype is None and value.dtype == "float64":
                dtype = keras.config.floatx()
            dtype, shape = dtype or value.dtype, value.shape
            initializer = keras.initializers.Zeros()
        original(self, initializer, shape, dtype, **kwargs)

    KerasVariable.__init__ = __init__
    try:
        yield
    finally:
        KerasVariable.__init__ = original


@contextlib.contextmanager
def no_trace_left():
    """Restores global and random state; inside, no distribution is set."""
    tracker = global_state.GLOBAL_STATE_TRACKER
    settings = global_state.GLOBAL_SETTINGS_TRACKER
    state = {key: _copied(value) for key, value in vars(tracker).items()}
    python_random, numpy_random = random.getstate(), np.random.get_state()
    global_state.set_global_attribute("distribution", None)
    try:
        yield
    finally:
        # `clear_session` replaces the trackers.
        global_state.GLOBAL_STATE_TRACKER = tracker
        global_state.GLOBAL_SETTINGS_TRACKER = settings
        vars(tracker).clear()
        vars(tracker).update(state)
        random.setstate(python_random)
        np.random.set_state(numpy_random)


def _copied(value):
    return value.copy() if isinstance(value, (dict, list, set)) else value
