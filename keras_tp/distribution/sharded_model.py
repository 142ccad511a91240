"""Moves an existing model, trained or not, to a distribution."""

import contextlib

from keras.src.distribution.distribution_lib import distribution as current
from keras.src.models.model import Model

from keras_tp import backend
from keras_tp.distribution import arguments
from keras_tp.distribution import distribution_lib
from keras_tp.distribution import model_state
from keras_tp.distribution import optimizer_slots
from keras_tp.distribution import variable_origin


def distribute_model(model, distribution=None):
    """Moves a built model to a distribution in place; its values stay the same.

    Weights, optimizer slots, metrics and random state move one at a time, so
    no second copy of the model is made. Every layout is checked before the
    first variable moves. If a move fails, the variables that have moved go
    back. From then on, the model belongs to this distribution. In a run of
    several processes, every process must call this.

    Example:

    ```python
    model = keras.models.load_model("model.keras")
    distribute_model(model, ModelParallel(layout_map=layout_map))
    model.fit(x, y)
    # And back to one device:
    distribute_model(model, DataParallel(devices=["cpu:0"]))
    ```

    Args:
        model: A built Keras model (or layer).
        distribution: `Distribution`. Defaults to the one that is set.

    Returns:
        The same model.

    Raises:
        ValueError: if no distribution is given or set, the model is not built,
            or a layout does not fit its variable.
    """
    distribution = current() if distribution is None else distribution
    if distribution is None:
        raise ValueError(
            "`distribute_model` needs a distribution: pass one, or set one "
            "with `keras_tp.distribution.set_distribution`. To bring a model "
            "back to one device, pass `DataParallel(devices=['cpu:0'])`."
        )
    arguments.check_model(model, "distribute_model")
    arguments.check_distribution(distribution)
    if not model.built:
        raise ValueError(
            f"`distribute_model` needs a built model. Call {model.name!r} on "
            "some data first, or set the distribution before you build it. "
            f"Received: model={model}"
        )
    distribution_lib.install()
    if hasattr(distribution, "plan_model"):
        distribution.plan_model(model)
    _move(planned_layouts(model, distribution))
    variable_origin.note_made_under(model, distribution)
    for layer in model._flatten_layers():
        model_state.forget_functions(layer)
    if isinstance(model, Model):
        with variable_origin.scope_of(distribution):
            model_state.check_model(model)
    return model


def planned_layouts(model, distribution):
    """Returns `(variable, origin, layout)` for all state; moves nothing."""
    optimizer = getattr(model, "optimizer", None)
    slots = optimizer_slots.slots_of(optimizer) if optimizer else ()
    slots = {id(slot): (variable, dims) for slot, variable, dims in slots}
    planned = {}
    for variable, role in model_state.variables_of(model):
        root = _root(variable, model)
        made = variable_origin.Origin(role, root, distribution)
        if id(variable) in slots:
            # It follows its variable, which comes before it.
            followed, dims = slots[id(variable)]
            layout = optimizer_slots.slot_layout(
                planned[id(followed)][2], variable.shape, dims, distribution
            )
        else:
            layout = _layout_as_new(variable, made, distribution)
        planned[id(variable)] = variable, made, layout
    return list(planned.values())


def _root(variable, model):
    noted = variable_origin.origin_of(variable).root
    first = variable.path.split("/")[0]
    return noted or (model.name if first == model.name else None)


def _layout_as_new(variable, made, distribution):
    """Returns the layout that a variable would get if it were new."""
    noted, layout = variable_origin.origin_of(variable), variable._layout
    variable._origin, variable._layout = made, None
    try:
        return distribution.get_variable_layout(variable)
    finally:
        variable._origin, variable._layout = noted, layout


def _move(planned):
    lib = backend.distribution_lib

    def put_back(variable, made, layout):
        lib.relayout_variable(variable, layout)
        _note_origin(variable, made)

    with contextlib.ExitStack() as undo:
        for variable, made, layout in planned:
            before = variable_origin.origin_of(variable), variable._layout
            lib.relayout_variable(variable, layout)
            undo.callback(put_back, variable, *before)
            _note_origin(variable, made)
        undo.pop_all()


def _note_origin(variable, made):
    variable._origin = made
    if made.role == variable_origin.WEIGHT:
        optimizer_slots.note_slot_layout(variable)
