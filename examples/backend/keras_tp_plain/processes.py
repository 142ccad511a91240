"""The processes of a run. This backend has one."""


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
    """Returns a list of one small value per process. A collective."""
    return [value]


def meet(what):
    """Waits for all processes. A collective."""


def random_state():
    """Returns the state of JAX's own generators: it has none."""
    return {}


def set_random_state(state):
    """Sets what `random_state` returned."""
