"""The one process of a run, which has all devices."""

import torch

from keras_tp.backend.processes import timeouts

TIMEOUT_S = timeouts.timeout()


def world_size():
    """Returns the number of processes."""
    return 1


def index():
    """Returns the index of this process."""
    return 0


def is_first():
    """Returns whether this process prints and writes files for all."""
    return True


def gather(value, what):
    """Returns a list of one value per process."""
    return [value]


def meet(what):
    """Waits for the other processes, of which there are none."""


def from_first(value):
    """Returns the value of process 0."""
    return value


def same_model(model):
    """Compares the models of all processes: there is one."""


def random_state():
    """Returns the state of torch's random generator."""
    return {"cpu": torch.get_rng_state().numpy()}


def set_random_state(state):
    """Sets the state that `random_state` returned."""
    if "cpu" in state:
        torch.set_rng_state(torch.from_numpy(state["cpu"]))
