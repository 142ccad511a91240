"""Variables whose tensors have a sharding, from their first value on."""

import functools

import torch
from keras.src.backend.torch import core
from keras.src.distribution.distribution_lib import distribution

from keras_tp.backend.saving import expected_values
from keras_tp.backend.torch_xla import placement


def hook_initialize(original):
    """Marks the first value of a variable with its layout."""

    @functools.wraps(original)
    def _initialize(self, value):
        current = distribution()
        if current is None or is_counter(self):
            # Counters of random draws stay in the host's memory: a draw reads
            # them, and would wait for all that XLA has recorded.
            if is_counter(self):
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
        original(self, value)
        placement.mark(self._value, placement.as_placement(self._layout))

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


def is_counter(variable):
    """Returns whether a variable counts the draws of a seed generator."""
    # Noted by `distribution/variable_origin.py`.
    origin = getattr(variable, "_origin", None)
    return origin is not None and origin.role == "seed"


def move(variable, layout):
    """Gives a variable, and its gradient, another layout; `None`: whole."""
    if is_counter(variable):
        return
    placed = None if layout is None else placement.as_placement(layout)
    with torch.no_grad():
        placement.mark(variable._value, placed)
        if variable._value.grad is not None:
            placement.mark(variable._value.grad, placed)
