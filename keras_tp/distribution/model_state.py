"""A model's distribution and state, and when it is checked and planned."""

import contextlib
import gc
import threading

from keras.src import backend as keras_backend
from keras.src.backend.common.stateless_scope import in_stateless_scope
from keras.src.distribution.distribution_lib import distribution
from keras.src.models.model import Model

from keras_tp import backend
from keras_tp.distribution import variable_origin
from keras_tp.distribution.variable_origin import scope_of


class _State(threading.local):
    # Whether this thread is checking a model.
    is_checking = False
    # The layer or model of the outermost call in this thread.
    outermost_call = None


_state = _State()


def outermost_call():
    """Returns the layer of the outermost call in this thread, or `None`."""
    return _state.outermost_call


@contextlib.contextmanager
def calling(layer):
    """Context of the outermost call."""
    _state.outermost_call = layer
    try:
        yield
    finally:
        _state.outermost_call = None


def distribution_of(layer):
    """Returns the distribution that a layer or model belongs to.

    It is the distribution that its weights were made under or, if it has no
    weights yet, the distribution that the layer was made under; `None` if none
    was set then.

    Raises:
        ValueError: if a model's weights were made under several
            distributions, or some of them under none.
    """
    made_under = {}
    for variable in layer.weights:
        value = variable_origin.origin_of(variable).distribution
        made_under.setdefault(id(value), (value, variable.path))
    if len(made_under) > 1 and isinstance(layer, Model):
        parts = "; ".join(
            f"{path!r} under {value or 'no distribution'}"
            for value, path in made_under.values()
        )
        raise ValueError(
            f"The variables of model {layer.name!r} were made under different "
            f"distributions: {parts}. Build all parts of a model under one "
            "distribution, or call `keras_tp.distribution.distribute_model("
            "model, distribution)` to move the whole model to one."
        )
    if not made_under:
        return variable_origin.made_under(layer)
    return next(iter(made_under.values()))[0]


@contextlib.contextmanager
def entered(model):
    """Context in which a model's own distribution is the current one.

    If the model was made under no distribution and has no weights yet, the
    current setting stays.

    Raises:
        ValueError: if the weights were made under no distribution and one is
            set.
    """
    own = distribution_of(model)
    current = distribution()
    if own is None and current is not None and model.weights:
        raise ValueError(
            f"Model {model.name!r} was built before the distribution was set, "
            "so its variables are on one device. Build the model under the "
            "distribution, or move it there with "
            f"`keras_tp.distribution.distribute_model(model)`. First such "
            f"variable: {model.weights[0].path!r}. Received: {current}"
        )
    if own is None or own is current:
        yield
        return
    with scope_of(own):
        yield


def check_model(model):
    """Lets the current distribution check, and plan, a model once.

    Variables cannot move while a function is traced: the model is then checked
    later. A model is checked again if more of it has been built since.
    """
    current = distribution()
    if (
        # Keras's own distributions have no checks.
        not hasattr(current, "check_model")
        or _state.is_checking
        or not may_move()
        or not model.weights
        or not current.can_check(model)
        or _is_checked(model)
    ):
        return
    _state.is_checking = True
    try:
        current.check_model(model)
    finally:
        _state.is_checking = False
    vars(model)["_checked_distribution"] = current, len(model.weights)
    vars(model)["_awaits_call"] = False


def build_parts(model, call_spec):
    """Builds the layers of a model that Keras takes for built.

    A model with a `build` method may leave its layers to their first call. The
    model would be planned in the middle of it, and variables moved that the
    call has read.
    """
    if _is_checked(model) or not hasattr(distribution(), "check_model"):
        return
    if all(layer.built for layer in model._flatten_layers()):
        return
    # As in Keras, the call itself builds them otherwise, or raises the error.
    with contextlib.suppress(Exception):
        keras_backend.compute_output_spec(
            model.call, **call_spec.arguments_dict
        )


def check_complete_model(model):
    """Calls `check_model` if all layers of a model are built."""
    # The cheap test is first: every call of a model gets here.
    if not _is_checked(model) and is_complete(model):
        check_model(model)


def _is_checked(model):
    checked = distribution(), len(model.weights)
    return vars(model).get("_checked_distribution") == checked


def was_checked(model):
    """Returns whether the current distribution has checked a model.

    Unlike `check_model`, it does not look for variables made since.
    """
    current = distribution()
    checked_under, _ = vars(model).get("_checked_distribution", (None, 0))
    return current is None or checked_under is current


def is_complete(model):
    """Returns whether a model has all of its variables, and their values."""
    if not all(layer.built for layer in model._flatten_layers()):
        return False
    weights = model.weights
    return bool(weights) and all(v._value is not None for v in weights)


def may_move():
    """Returns whether variables may move: not in a trace or stateless scope."""
    return (
        not in_stateless_scope() and not backend.distribution_lib.is_tracing()
    )


def may_move_after_call(model):
    """Returns whether variables may move that a call has read.

    They may not if gradients will be computed for the values that were read:
    the next call of the model then plans it.
    """
    awaits_call = (
        backend.distribution_lib.records_gradients() and not _is_checked(model)
    )
    vars(model)["_awaits_call"] = awaits_call
    return not awaits_call


def adopt_state(model):
    """Replicates model state that has no layout.

    The state of an optimizer, a metric or a seed generator that was made
    outside of the model's distribution is on one device. It is small, and
    belongs to the model from now on.
    """
    current = distribution()
    if current is None:
        return
    # Nearly always there is nothing to adopt. Each `fit` gets here, and lists
    # of all variables take time.
    found = model.variables, *(group for _, group in _state_of(model))
    if any(v._layout is None for group in found for v in group):
        state = variables_of(model)
        adopt((v for v in state if v[1] != variable_origin.WEIGHT), current)


def adopt(state, current):
    """Replicates state that has no layout, and notes its distribution.

    Args:
        state: Iterable of pairs `(variable, role)`.
        current: `Distribution`.
    """
    for variable, role in state:
        if variable._layout is None and variable._value is not None:
            variable._origin = variable_origin.Origin(role, None, current)
            backend.distribution_lib.relayout_variable(
                variable, current.get_variable_layout(variable)
            )


def variables_of(model):
    """Yields `(variable, role)` for each weight, and then all other state."""
    groups = (
        (variable_origin.WEIGHT, model.weights),
        (variable_origin.SEED, model.variables),
        *_state_of(model),
    )
    seen = set()
    for role, variables in groups:
        for variable in variables:
            if id(variable) not in seen:
                seen.add(id(variable))
                yield variable, role


def _state_of(model):
    """Returns pairs of a role and variables, for state beside the layers."""
    return (
        # KerasHub's sampler draws the tokens that `generate` returns.
        (variable_origin.SEED, _variables_in(model, "sampler")),
        (variable_origin.METRIC, model.metrics_variables),
        (variable_origin.SLOT, _variables_in(model, "optimizer")),
    )


def _variables_in(model, attribute):
    return getattr(getattr(model, attribute, None), "variables", ())


def plan_model_with(variable):
    """Plans the outermost complete model that has a variable."""
    if _state.is_checking or not may_move():
        return
    is_read = _state.outermost_call is not None
    if is_read and backend.distribution_lib.records_gradients():
        return
    if not _complete_models_with(variable):
        return
    if backend.distribution_lib.num_processes() > 1:
        # Else a model that was dropped may live on in some processes only.
        gc.collect()
    found = _complete_models_with(variable)
    parts = {
        id(part)
        for model in found
        for part in model._flatten_layers(include_self=False)
    }
    # A `Sequential` does not list the `Functional` that it keeps.
    parts |= {id(getattr(model, "_functional", None)) for model in found}
    for model in found:
        if id(model) not in parts:
            with entered(model):
                check_model(model)


def _complete_models_with(variable):
    return [
        model
        for model in variable_origin.live_models()
        # Keras sets this attribute at the end of `__init__`.
        if "_parent_path" in vars(model)
        and not vars(model).get("_awaits_call")
        and any(v is variable for v in model.weights)
        and is_complete(model)
    ]


def forget_functions(layer):
    """Drops functions compiled for other layouts or other variables."""
    # KerasHub's models generate text.
    for kind in ("train", "test", "predict", "generate"):
        if hasattr(layer, f"{kind}_function"):
            setattr(layer, f"{kind}_function", None)
