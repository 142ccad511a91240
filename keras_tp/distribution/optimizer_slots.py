"""Layouts of optimizer slots, derived from their variables' layouts."""

from keras.src.optimizers.base_optimizer import BaseOptimizer

from keras_tp import backend
from keras_tp.backend import hooks
from keras_tp.distribution import model_state
from keras_tp.distribution import variable_origin
from keras_tp.distribution.tensor_layout import axis_names
from keras_tp.distribution.tensor_layout import axis_size
from keras_tp.distribution.tensor_layout import layout_like
from keras_tp.distribution.tensor_layout import split_largest_dim


@hooks.around
def lay_out_factors(original, self, var_list):
    """Wraps `Adafactor.build`, whose factors Keras makes without a layout."""
    original(self, var_list)
    for slot, variable, dims in slots_of(self):
        layout = variable._layout
        if layout is not None and len(dims) < len(variable.shape):
            own = variable_origin.origin_of(variable).distribution
            backend.distribution_lib.relayout_variable(
                slot, slot_layout(layout, slot.shape, dims, own)
            )


@hooks.around
def lay_out_own_state(original, self, variables):
    """Wraps `build`, to replicate the step counter and the learning rate.

    A custom loop may make its optimizer outside of the model's distribution.
    """
    of_variables = (
        variable_origin.origin_of(variable).distribution
        for variable in variables
        if getattr(variable, "_layout", None) is not None
    )
    own = next(of_variables, None)
    if own is not None and model_state.may_move():
        state = ((v, variable_origin.SLOT) for v in self._variables)
        with variable_origin.scope_of(own):
            model_state.adopt(state, own)
    original(self, variables)


@hooks.around
def lay_out_slots(original, self, /, reference_variable, *args, **kwargs):
    """Wraps `add_variable_from_reference`, to split slots further.

    An optimizer that no model has, as in a custom loop, may be the first to use
    a variable. The model is planned before, because its plan does not move the
    slots of such an optimizer.
    """
    if getattr(reference_variable, "_awaits_plan", False):
        model_state.plan_model_with(reference_variable)
    layout = getattr(reference_variable, "_layout", None)
    if layout is None:
        return original(self, reference_variable, *args, **kwargs)
    note_slot_layout(reference_variable)
    # Keras gives this layout to the slot.
    reference_variable._layout = reference_variable._slot_layout or layout
    try:
        return original(self, reference_variable, *args, **kwargs)
    finally:
        reference_variable._layout = layout


def note_slot_layout(variable):
    """Records on a variable the layout of its slots, if they are split further.

    A backend may then reduce-scatter the gradient to these shards.
    """
    layout, shape = variable._layout, tuple(variable.shape)
    own = variable_origin.origin_of(variable).distribution
    found = layout and slot_layout(layout, shape, range(len(shape)), own)
    if found is not None and found.axes == layout.axes:
        found = None
    variable._slot_layout = found


def slots_of(optimizer):
    """Yields `(slot, variable, dims)` for the slots of an optimizer.

    Keras's optimizers keep each kind of slot in a list, in the order of the
    variables they were built for. A slot has all dims of its variable, unless
    it is factored. Optimizers inside the optimizer are included.
    """
    variables = getattr(optimizer, "_trainable_variables", None) or []
    inner = []
    # A model that is not compiled has no optimizer.
    for name, value in vars(optimizer).items() if optimizer else ():
        listed = value if isinstance(value, (list, tuple)) else [value]
        inner += [v for v in listed if isinstance(v, BaseOptimizer)]
        is_own = name in ("_variables", "_trainable_variables")
        if listed is value and len(value) == len(variables) and not is_own:
            for slot, variable in zip(value, variables):
                dims = _kept_dims(name, slot, variable)
                if dims:
                    yield slot, variable, dims
    for other in inner:
        yield from slots_of(other)


def slot_layout(layout, shape, dims, distribution):
    """Returns the layout of a slot of a variable with the given layout.

    A slot that sums over some dims of its variable, as the row and column
    factors of Adafactor do (Shazeer and Stern 2018, section 3), is split along
    its remaining dims as the variable is. If the distribution shards the
    optimizer (ZeRO-1, Rajbhandari et al. 2020, section 5), the largest
    replicated dim that divides evenly is split over the batch axis.

    `shape` is that of the slot, `dims` the dims of the variable that it has,
    and `distribution` the one of the variable.
    """
    mesh = layout.device_mesh
    axes = [layout.axes[dim] for dim in dims]
    batch = getattr(distribution, "batch_dim_name", None)
    used = [name for axis in axes for name in axis_names(axis)]
    is_sharded = getattr(distribution, "shard_optimizer", False)
    if is_sharded and batch not in used and axis_size(mesh, batch) > 1:
        axes = split_largest_dim(axes, shape, batch, mesh)
    return layout_like(axes, layout, dims)


def _kept_dims(name, slot, variable):
    whole = tuple(range(len(variable.shape)))
    if not hasattr(slot, "_layout"):
        return ()
    if slot.shape == variable.shape:
        return whole
    # By name, because the factors of a square kernel have equal shapes.
    kept = {"_r": whole[:-1], "_c": whole[:-2] + whole[-1:]}.get(name, ())
    fits = slot.shape == tuple(variable.shape[dim] for dim in kept)
    return kept if fits else ()
