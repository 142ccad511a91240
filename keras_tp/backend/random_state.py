"""What random numbers come next, so that a resumed run draws the same.

Keras saves the variables of a model, but not the counters of its seed
generators, such as those of `Dropout`. Nor does it save the generators of
Python, numpy and the framework, which shuffle the data.
"""

import base64
import random

import numpy as np
from keras.src import backend
from keras.src.backend.common import global_state


def noted(model, processes):
    """Returns the state of all generators, as JSON can hold it.

    Args:
        model: A built Keras model.
        processes: The backend's module of that name, with `random_state`.
    """
    kind, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": [kind, _text(keys), *rest],
        "keras": [
            _text(backend.convert_to_numpy(counter).astype("int64"))
            for counter in _counters(model)
        ],
        "framework": {
            name: _text(held) for name, held in processes.random_state().items()
        },
    }


def restore(model, processes, state):
    """Sets all generators to what `noted` returned.

    A part that this run does not have, as that of another framework, is left
    out. So are the counters where the model has other seed generators.

    Args:
        model: A built Keras model.
        processes: The backend's module of that name, with `set_random_state`.
        state: Dict.
    """
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, _array(keys, "uint32"), *rest))
    counters = _counters(model)
    if len(counters) == len(state["keras"]):
        for counter, held in zip(counters, state["keras"]):
            counter.assign(_array(held, "int64").astype(counter.dtype))
    held = {
        name: _array(text, "uint8")
        for name, text in state["framework"].items()
        if name in processes.random_state()
    }
    if held:
        processes.set_random_state(held)


def _counters(model):
    """Returns the counters of a model, and the one for numbers beside it."""
    weights = {id(variable) for variable in model.weights}
    found = [
        variable
        for variable in model.variables
        if id(variable) not in weights and "int" in variable.dtype
    ]
    beside = global_state.get_global_attribute("global_seed_generator")
    return found + ([] if beside is None else [beside.state])


def _text(array):
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()


def _array(text, dtype):
    return np.frombuffer(base64.b64decode(text), dtype).copy()
