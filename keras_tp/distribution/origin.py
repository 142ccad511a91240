"""What made a variable: its role, its outer model and its distribution."""

import collections

from keras.src.backend.common import global_state
from keras.src.metrics.metric import Metric
from keras.src.models.model import Model
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.random.seed_generator import SeedGenerator

WEIGHT = "weight"
SLOT = "slot"
METRIC = "metric"
SEED = "seed"

_ROLES = ((BaseOptimizer, SLOT), (Metric, METRIC), (SeedGenerator, SEED))


class Origin(
    collections.namedtuple(
        "Origin", ["role", "root", "distribution", "follows"], defaults=[None]
    )
):
    """Where a variable comes from, noted when it is made.

    Args:
        role: One of `"weight"`, `"slot"`, `"metric"` and `"seed"`.
        root: Name of the outermost model in the variable's path, or `None`
            where the first part of the path is not a model.
        distribution: The `Distribution` that was set, or `None`.
        follows: String, why what splits its kernel does not split it, of a
            variable that LoRA or quantization added. Defaults to `None`.
    """


_UNKNOWN = Origin(WEIGHT, None, None)


def origin_of(variable):
    """Returns the `Origin` of a variable; unless noted, a plain weight's."""
    return getattr(variable, "_origin", _UNKNOWN)


def current_origin():
    """Returns the `Origin` of a variable that would be made right now."""
    callers = [(scope.name, scope.caller) for scope in _name_scopes()]
    role = WEIGHT
    for kind, name in _ROLES:
        if any(isinstance(caller, kind) for _, caller in callers):
            role = name
    return Origin(
        role, current_root(), global_state.get_global_attribute("distribution")
    )


def current_root():
    """Returns the name of the model that opens the current path, or `None`."""
    scopes = _name_scopes()
    # A scope with an absolute parent starts the path anew.
    path = []
    for scope in scopes:
        if scope.override_parent is not None:
            path = [part for part in scope.override_parent.split("/") if part]
        path.append(scope.name)
    for scope in scopes:
        if isinstance(scope.caller, Model) and scope.name == path[0]:
            return scope.name
    return None


def note_origin(original):
    """Wraps `Variable.__init__` so that each variable carries its `Origin`."""

    def __init__(self, *args, **kwargs):
        self._origin = current_origin()
        original(self, *args, **kwargs)

    return __init__


def _name_scopes():
    return global_state.get_global_attribute("name_scope_stack") or []
