"""Variables that are DTensors, from their first value on."""

import functools
import weakref

import numpy as np
import torch
from keras.src import initializers
from keras.src.backend.common import is_float_dtype
from keras.src.backend.torch import core
from keras.src.distribution.distribution_lib import distribution
from torch.distributed.tensor import DTensor

from keras_tp.backend.saving import expected_values
from keras_tp.backend.torch import gradient_sums
from keras_tp.backend.torch import placement


def hook_initialize(original):
    """Makes a variable as its shard, of a value that all processes hold."""

    @functools.wraps(original)
    def _initialize(self, value):
        if distribution() is None:
            return original(self, value)
        if isinstance(value, torch.nn.Parameter):
            raise NotImplementedError(
                "A parameter of a torch module cannot be distributed, but "
                f"variable {self.path!r} has to share it. Build the model "
                "before you set a distribution and call "
                "`keras_tp.distribution.distribute_model`, or write the module "
                f"as Keras layers. Received: {type(value)} of shape "
                f"{tuple(value.shape)}"
            )
        value = core.convert_to_tensor(value, dtype=self._dtype)
        self._shape = self._validate_shape(value.shape)
        lay_out(self, value, _give_layout(self))

    return _initialize


def hook_initialize_with_initializer(original):
    """Makes only the shards of constants such as slots; slices other values."""

    @functools.wraps(original)
    def _initialize_with_initializer(self, initializer):
        placed = _give_layout(self)
        if placed is None or _stays_plain(self, placed):
            return original(self, initializer)
        fill = _constant_of(initializer)
        if expected_values.is_expected(self, initializer, self._layout):
            fill = 0
        if fill is None:
            return original(self, initializer)
        set_value(self, _filled(self, fill, placed))

    return _initialize_with_initializer


def _filled(variable, fill, placed):
    dtype = core.to_torch_dtype(variable._dtype)
    return placement.filled(variable._shape, fill, dtype, placed)


def lay_out(variable, value, layout):
    """Sets the value of a variable to a tensor, split by a layout."""
    placed = placement.as_placement(layout)
    if _stays_plain(variable, placed):
        placed = None
    if placed is not None and expected_values.is_waiting(variable):
        set_value(variable, _filled(variable, 0, placed))
        return
    set_value(variable, _placed_anew(value.detach(), placed))


def move(variable, layout):
    """Gives a variable, and its gradient, another layout; `None`: plain."""
    gradient = variable._value.grad
    if layout is None:
        set_value(variable, placement.to_full(variable._value.detach()))
    else:
        lay_out(variable, variable._value, layout)
    if gradient is not None:
        value = variable._value
        placed = None
        if isinstance(value, DTensor):
            placed = placement.as_placement(layout)
        value.grad = _placed_anew(gradient.detach(), placed)


def _placed_anew(value, placed):
    """Returns a tensor with another `Placement`; `None`: a plain tensor."""
    if placed is None:
        return placement.to_full(value)
    if not isinstance(value, DTensor) or value.device_mesh != placed.mesh:
        # A DTensor cannot be redistributed to another mesh.
        return placement.from_full(placement.to_full(value), placed)
    value = placement.redistributed(value, placed.placements)
    local = value._local_tensor
    if local.untyped_storage().nbytes() > local.nbytes:
        # After a move from one split dim to another without an all-to-all, the
        # shard is a view of the whole tensor, and would keep it.
        value._local_tensor = local.clone(memory_format=torch.contiguous_format)
    return value


def set_value(variable, value):
    """Sets the value of a variable, as a `torch.nn.Parameter`."""
    parameter = torch.nn.Parameter(value, requires_grad=variable.trainable)
    if isinstance(parameter, DTensor) and parameter.requires_grad:
        # Data parallelism adds up gradients here, and only here.
        parameter.register_hook(
            functools.partial(
                _redistributed,
                variable=weakref.ref(variable),
                parameter=weakref.ref(parameter),
            )
        )
        parameter.register_post_accumulate_grad_hook(gradient_sums.collect)
    variable._value = parameter


def whole(variable):
    """Returns a split value as a plain tensor; `None` of a plain one."""
    value = variable._value
    if isinstance(value, DTensor):
        return placement.to_full(value.detach())
    return None


def _give_layout(variable):
    """Sets a variable's layout; returns it as a `Placement`, or `None`."""
    current = distribution()
    if current is None:
        return None
    variable._layout = current.get_variable_layout(variable)
    return placement.as_placement(variable._layout)


def _constant_of(initializer):
    """Returns the constant of an initializer; `None` for other initializers."""
    kind = type(initializer)
    if kind is initializers.Zeros:
        return 0
    if kind is initializers.Ones:
        return 1
    if kind is initializers.Constant and np.ndim(initializer.value) == 0:
        return initializer.value
    return None


def _stays_plain(variable, placed):
    """Returns whether a variable is a plain tensor in every process.

    Counters and random state are plain: they are not split, they have no
    gradient, and Python reads them.
    """
    if placed.mesh is None:
        return True
    if variable.trainable or placed.is_split:
        return False
    return len(variable._shape) == 0 or not is_float_dtype(variable._dtype)


def _redistributed(gradient, variable, parameter):
    parameter = parameter()
    mesh, placements = parameter.device_mesh, parameter.placements
    # If the slots are split further, a reduce-scatter gives each process only
    # its slots' part of the gradient.
    slots = getattr(variable(), "_slot_layout", None)
    if slots is not None:
        placements = placement.as_placement(slots).placements
    if not isinstance(gradient, DTensor):
        placed = placement.Placement(mesh, placements)
        return placement.from_full(gradient, placed)
    if gradient.placements == placements:
        return gradient
    if slots is None and gradient_sums.waits(gradient, parameter):
        return gradient
    return placement.redistributed(gradient, placements)
