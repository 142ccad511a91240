"""Variables whose tensors have a sharding, from their first value on."""

import functools

import torch
from keras.src.backend.torch import core
from keras.src.distribution.distribution_lib import distribution

from keras_tp.backend.saving import expected_values
from keras_tp.backend.torch_xla import devices
from keras_tp.backend.torch_xla import placement


def hook_initialize(original):
    """Marks the first value of a variable with its layout."""

    @functools.wraps(original)
    def _initialize(self, value):
        current = distribution()
        if current is None or is_counter(self):
            if current is not None:
                with core.device_scope("cpu"):
                    return original(self, value)
            return original(self, value)
        if isinstance(value, torch.nn.Parameter):
            raise NotImplementedError(
                "A parameter of a torch module cannot be distributed, but "
                f"variable {self.path!r} has to share it. Write the module as "
                f"Keras layers. Received: {type(value)} of shape "
                f"{tuple(value.shape)}"
            )
        value = core.convert_to_tensor(value, dtype=self._dtype)
        self._shape = self._validate_shape(value.shape)
        self._layout = current.get_variable_layout(self)
        _set(self, value, placement.as_placement(self._layout))

    return _initialize


def hook_initialize_with_initializer(original):
    """Makes zeros of what is loaded later."""

    @functools.wraps(original)
    def _initialize_with_initializer(self, initializer):
        current = distribution()
        if current is not None and not is_counter(self):
            layout = current.get_variable_layout(self)
            if expected_values.is_expected(self, initializer, layout):
                dtype = core.to_torch_dtype(self._dtype)
                return self._initialize(torch.zeros(self._shape, dtype=dtype))
        return original(self, initializer)

    return _initialize_with_initializer


def hook_direct_assign(original):
    """Keeps the sharding of a variable that gets another value."""

    @functools.wraps(original)
    def _direct_assign(self, value):
        if placement.is_xla(self._value) and self._layout is not None:
            # torch would take the sharding over from the value.
            placed = placement.as_placement(self._layout)
            value = placement.constrained(value.to("xla"), placed)
        return original(self, value)

    return _direct_assign


def apply(original, self, grads, trainable_variables=None):
    """Updates variables under their distribution, as loops outside of it do.

    `original` is the method of an optimizer.
    """
    variables = trainable_variables or self._trainable_variables
    origins = [getattr(variable, "_origin", None) for variable in variables]
    own = next((o.distribution for o in origins if o is not None), None)
    if distribution() is not None or own is None:
        return original(self, grads, trainable_variables)
    with own.scope():
        return original(self, grads, trainable_variables)


def is_counter(variable):
    """Returns whether a variable counts the draws of a seed generator.

    Counters stay in the host's memory: a draw reads them, and would wait for
    all that XLA has recorded.
    """
    # Noted by `distribution/variable_origin.py`.
    origin = getattr(variable, "_origin", None)
    return origin is not None and origin.role == "seed"


def move(variable, layout):
    """Gives a variable, and its gradient, another layout; `None`: plain."""
    if is_counter(variable):
        return
    placed = None if layout is None else placement.as_placement(layout)
    gradient = variable._value.grad
    _set(variable, variable._value.detach(), placed)
    if gradient is not None:
        variable._value.grad = _placed(gradient.detach(), placed)


def whole(variable):
    """Returns a value of XLA as a plain tensor; `None` of a plain one."""
    value = variable._value
    if placement.is_xla(value):
        return value.detach().cpu().to(devices.of_keras())
    return None


def _set(variable, value, placed):
    """Sets the value of a variable, as a `torch.nn.Parameter`.

    A new one each time: torch cannot give a parameter another kind of tensor.
    """
    variable._value = torch.nn.Parameter(
        _placed(value, placed), requires_grad=variable.trainable
    )


def _placed(value, placed):
    """Returns a tensor with a `Placement`; `None`: in the host's memory."""
    # Through the host: nothing recorded refers to the new tensor.
    value = value.cpu() if placement.is_xla(value) else value
    if placed is None or placed.mesh is None:
        return value.to(devices.of_keras())
    return placement.mark(value.to("xla"), placed)
