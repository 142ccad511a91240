"""Which layout an optimizer's slot takes from the variable it belongs to."""

import functools

from keras.src.optimizers.base_optimizer import BaseOptimizer

from keras_tp import backend
from keras_tp.distribution.tensor_layout import TensorLayout


def lay_out_factors(original):
    """Wraps `Adafactor.build`: Keras makes its factors without a layout."""

    @functools.wraps(original)
    def build(self, var_list):
        original(self, var_list)
        for slot, variable, dims in slots_of(self):
            layout = variable._layout
            if layout is not None and len(dims) < len(variable.shape):
                backend.distribution_lib.relayout_variable(
                    slot, slot_layout(layout, dims)
                )

    return build


def slots_of(optimizer):
    """Yields `(slot, variable, dims)` for the slots of an optimizer.

    Keras's optimizers keep each kind of slot in a list that runs parallel to
    the variables they were built for.

    Args:
        optimizer: A Keras optimizer. Those inside it are looked into too.

    Yields:
        The slot, the model's variable, and the dims of the variable that the
        slot has: all of them but for a factored slot.
    """
    variables = getattr(optimizer, "_trainable_variables", None) or []
    inner = []
    for name, value in vars(optimizer).items():
        if isinstance(value, BaseOptimizer):
            inner.append(value)
        elif not isinstance(value, (list, tuple)):
            continue
        elif value and all(isinstance(v, BaseOptimizer) for v in value):
            inner.extend(value)
        elif len(value) == len(variables) and name not in (
            "_variables",
            "_trainable_variables",
        ):
            for slot, variable in zip(value, variables):
                dims = _kept_dims(name, slot, variable)
                if dims:
                    yield slot, variable, dims
    for other in inner:
        yield from slots_of(other)


def slot_layout(layout, dims):
    """Returns the layout of a slot of a variable with the given layout.

    A slot that sums over some dims of its variable, as the row and column
    factors of Adafactor do (Shazeer and Stern 2018, section 3), is split where
    the dims that it keeps are.

    Args:
        layout: `TensorLayout` of the variable.
        dims: Tuple of ints, the dims of the variable that the slot has.
    """
    axes = [layout.axes[dim] for dim in dims]
    return TensorLayout(axes, layout.device_mesh)


def _kept_dims(name, slot, variable):
    if not hasattr(slot, "_layout"):
        return ()
    whole = tuple(range(len(variable.shape)))
    if slot.shape == variable.shape:
        return whole
    # Adafactor names its factors; of a square kernel their shapes are equal.
    kept = {"_r": whole[:-1], "_c": whole[:-2] + whole[-1:]}.get(name, ())
    fits = slot.shape == tuple(variable.shape[dim] for dim in kept)
    return kept if fits else ()
