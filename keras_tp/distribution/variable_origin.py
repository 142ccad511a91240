"""Records the role, model and distribution of variables and layers."""

import collections
import contextlib
import functools
import itertools
import weakref

from keras.src.backend.common import global_state
from keras.src.distribution.distribution_lib import distribution
from keras.src.distribution.distribution_lib import set_distribution
from keras.src.metrics.metric import Metric
from keras.src.models.model import Model
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.random.seed_generator import SeedGenerator

from keras_tp.backend import hooks

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
    """The origin of a variable, recorded when it is made.

    Args:
        role: One of `"weight"`, `"slot"`, `"metric"` and `"seed"`.
        root: Name of the outermost model in the variable's path, or `None`
            if the first part of the path is not a model.
        distribution: The `Distribution` that was set, or `None`.
        follows: String, why a variable that LoRA or quantization added is not
            split like its kernel. Defaults to `None`, for other variables.
    """


_UNKNOWN = Origin(WEIGHT, None, None)
# Number -> model, for the models made while the hooks are installed.
_models = weakref.WeakValueDictionary()
_numbers = itertools.count()
# How many variables were made while the hooks are installed.
_made = [0]


def origin_of(variable):
    """Returns the `Origin` of a variable, by default a plain weight's."""
    return getattr(variable, "_origin", _UNKNOWN)


def current_origin():
    """Returns the `Origin` that a variable made now would have."""
    role = WEIGHT
    for kind, name in _ROLES:
        if any(isinstance(scope.caller, kind) for scope in _name_scopes()):
            role = name
    return Origin(role, current_root(), distribution())


def current_root():
    """Returns the model name that begins the current path, or `None`."""
    scopes, path = _name_scopes(), []
    for scope in scopes:
        # A scope with an absolute parent path starts a new path.
        if scope.override_parent is not None:
            path = [part for part in scope.override_parent.split("/") if part]
        path.append(scope.name)
    for scope in scopes:
        if isinstance(scope.caller, Model) and scope.name == path[0]:
            return scope.name
    return None


def current_layer():
    """Returns the layer whose call is under way, or `None`."""
    scopes = _name_scopes()
    return scopes[-1].caller if scopes else None


@hooks.around
def note_origin(original, self, /, *args, **kwargs):
    """Wraps `Variable.__init__` so that each variable carries its `Origin`."""
    self._origin = current_origin()
    _made[0] += 1
    original(self, *args, **kwargs)


def variables_made():
    """Returns how many variables were made while the hooks are installed."""
    return _made[0]


@contextlib.contextmanager
def scope_of(value):
    """Context in which a distribution, or `None`, is the current one."""
    before = distribution()
    set_distribution(value)
    try:
        yield
    finally:
        set_distribution(before)


def made_under(layer):
    """Returns the distribution, or `None`, that a layer was made under."""
    return vars(layer).get("_made_under")


def note_made_under(layer, value):
    """Records a distribution for a layer and all layers inside it."""
    for part in layer._flatten_layers():
        vars(part)["_made_under"] = value


def live_models():
    """Returns the live models, in the order in which they were made."""
    return [model for _, model in sorted(_models.items(), key=lambda m: m[0])]


@hooks.around
def note_layer(original, cls, /, *args, **kwargs):
    """Wraps `Layer.__new__`: a layer is built under its own distribution.

    A layer may be built long after the scope in which it was made.
    """
    layer = original(cls, *args, **kwargs)
    if isinstance(layer, Model):
        _models[next(_numbers)] = layer
    if distribution() is not None:
        vars(layer)["_made_under"] = distribution()
        layer.build = _build_under_own(layer, layer.build)
    return layer


def _build_under_own(layer, build):
    @functools.wraps(build)
    def build_under_own(*args, **kwargs):
        with scope_of(made_under(layer)):
            return build(*args, **kwargs)

    return build_under_own


def _name_scopes():
    return global_state.get_global_attribute("name_scope_stack") or []
