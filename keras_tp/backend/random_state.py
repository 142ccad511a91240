"""Saves and restores random state, so that a resumed run draws the same.

Keras saves the weights of a model, but not the counters of its seed
generators, such as in `Dropout`. It also does not save the generators of
Python, numpy and the framework, which shuffle the data.
"""

import random
import warnings

import numpy as np
from keras.src import backend
from keras.src.backend.common import global_state
from keras.src.random import seed_generator

from keras_tp.backend import current
from keras_tp.backend.processes import messages


def noted(model):
    """Returns the state of all random generators, as a string."""
    # Keras's default generator, for calls that pass no seed.
    beside = global_state.get_global_attribute("global_seed_generator")
    numbers = backend.convert_to_numpy
    state = {
        **_beside_models(),
        "model": [numbers(counter) for counter in _counters(model)],
        "keras": None if beside is None else numbers(beside.state),
    }
    return messages.encode(state).decode()


def noted_beside_models():
    """Returns the state of Python's, numpy's and the framework's generators.

    They are not part of Keras. Programs draw the order of their data from them.
    """
    return messages.encode(_beside_models()).decode()


def _beside_models():
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "framework": current.load("processes").random_state(),
    }


def restore(model, text):
    """Sets all random generators to the state that `noted` returned.

    Ignores the state of a framework that is not in use.
    """
    restore_beside_models(text)
    state = messages.decode(text.encode())
    if state["keras"] is not None:
        _assign(seed_generator.global_seed_generator().state, state["keras"])
    counters = _counters(model)
    if len(counters) == len(state["model"]):
        for counter, held in zip(counters, state["model"]):
            _assign(counter, held)
    else:
        warnings.warn(
            f"Model {model.name!r} has {len(counters)} seed generators, but "
            f"the backup holds the states of {len(state['model'])}. They are "
            "not restored, so dropout masks differ from the interrupted run.",
            stacklevel=3,
        )


def restore_beside_models(text, python=True):
    """Sets the generators of Python, numpy and the framework.

    Args:
        text: String that `noted` or `noted_beside_models` returned.
        python: Boolean. Whether to set the generators of Python and numpy.
            Defaults to `True`.
    """
    state = messages.decode(text.encode())
    if python:
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
    processes = current.load("processes")
    used = processes.random_state()
    held = {k: v for k, v in state["framework"].items() if k in used}
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


def _assign(counter, value):
    counter.assign(value.astype(counter.dtype))
