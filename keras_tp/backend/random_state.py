"""Saves and restores random state, so that a resumed run draws the same.

Keras saves the weights of a model, but not the counters of its seed
generators, such as in `Dropout`. It also does not save the generators of
Python, numpy and the framework, which shuffle the data.
"""

import base64
import random
import warnings

import numpy as np
from keras.src import backend
from keras.src.backend.common import global_state
from keras.src.random import seed_generator


def noted(model, processes):
    """Returns the state of all random generators, in types that JSON has.

    Args:
        model: A built Keras model.
        processes: The backend's `processes` module, with `random_state`.
    """
    kind, keys, *rest = np.random.get_state()
    # Keras's default generator, for calls that pass no seed.
    beside = global_state.get_global_attribute("global_seed_generator")
    return {
        "python": random.getstate(),
        "numpy": [kind, _text(keys), *rest],
        "model": [_value(counter) for counter in _counters(model)],
        "keras": None if beside is None else _value(beside.state),
        "framework": {
            name: _text(held) for name, held in processes.random_state().items()
        },
    }


def restore(model, processes, state):
    """Sets all random generators to the state that `noted` returned.

    Ignores the state of a framework that is not in use.

    Args:
        model: A built Keras model.
        processes: The backend's `processes` module, with `set_random_state`.
        state: Dict that `noted` returned.
    """
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, _array(keys, "uint32"), *rest))
    if state["keras"] is not None:
        _assign(seed_generator.global_seed_generator().state, state["keras"])
    counters = _counters(model)
    if len(counters) == len(state["model"]):
        for counter, held in zip(counters, state["model"]):
            _assign(counter, held)
    else:
        warnings.warn(
            f"Model {model.name!r} has {len(counters)} seed generators, and "
            f"the backup holds {len(state['model'])}: dropout draws other "
            "numbers than in the run that was interrupted.",
            stacklevel=3,
        )
    held = {
        name: _array(text, "uint8")
        for name, text in state["framework"].items()
        if name in processes.random_state()
    }
    if held:
        processes.set_random_state(held)


def _counters(model):
    """Returns the counters of a model's seed generators."""
    weights = {id(variable) for variable in model.weights}
    return [
        variable
        for variable in model.variables
        if id(variable) not in weights and "int" in variable.dtype
    ]


def _value(counter):
    return _text(backend.convert_to_numpy(counter).astype("int64"))


def _assign(counter, text):
    counter.assign(_array(text, "int64").astype(counter.dtype))


def _text(array):
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()


def _array(text, dtype):
    return np.frombuffer(base64.b64decode(text), dtype).copy()
