"""Adds up gradients of inputs while gradients of kernels are computed.

The gradient of a column-parallel layer's input is a sum over the devices, and
the gradient of its kernel needs no other device. So the sum is launched first,
then the kernel's gradient is computed, and the layer before waits for the sum
(Korthikanti et al. 2022, section 4.2.2, and Megatron-LM).

autograd's engine runs, of the nodes that are ready, the one with the highest
sequence number, and forward operations number their nodes upwards. A `_Launch`
behind the output of each layer gets the gradient that all readers of the output
added up. It runs as soon as it is ready. Its old number goes to the nodes of
the kernels' gradients: they run after it, and before the layer that made the
output. All processes have the same nodes, and so the same order.
"""

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from keras_tp.backend.torch import placement

# Above all numbers that operations get; those of leaves are higher still.
_FIRST = 2**62


def settle(tensor):
    """All-reduces partial sums of a layer's output, and later of its gradient.

    These are the conjugate operators f and g of Megatron-LM (Shoeybi et al.
    2019, section 3): one all-reduce for the output of a row-split layer, one
    for the gradient of the input of column-split layers. DTensor alone keeps
    partial sums for longer, and all-reduces them more than once.

    Other values than DTensors stay as they are.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    if torch.compiler.is_compiling():
        return _settle_compiled(tensor)
    tensor = placement.settled(tensor)
    if not tensor.requires_grad or tensor.is_leaf:
        return tensor
    if not any(placed.is_replicate() for placed in tensor.placements):
        # Its readers have no partial gradients to overlap.
        tensor.register_hook(complete)
        return tensor
    if number_below(tensor) is not None:
        # A layer returned the output of a layer inside of it.
        return tensor
    tensor.register_hook(complete)
    output = _Launch.apply(tensor)
    output.register_hook(launched)
    # Such as a mask of Keras's.
    vars(output).update(vars(tensor))
    run_first(output)
    return output


# Compiled steps call it as one operation. Then autograd gives the hook real
# gradients; torch's compiler would assume that they are split as the output.
@torch.compiler.allow_in_graph
def _settle_compiled(tensor):
    tensor = placement.settled(tensor)
    if tensor.requires_grad and not tensor.is_leaf:
        tensor.register_hook(placement.settled)
    return tensor


def launched(gradient):
    """Returns a gradient whose all-reduce, if it needs one, is under way.

    `complete` waits for it. So does any operation that reads it before.
    """
    if not isinstance(gradient, DTensor):
        return gradient
    return placement.settled(gradient, wait=torch.is_grad_enabled())


def complete(gradient):
    """Returns a gradient without partial sums, and waits for launched ones."""
    if not isinstance(gradient, DTensor):
        return gradient
    local = gradient._local_tensor
    if isinstance(local, AsyncCollectiveTensor):
        local = local.trigger_wait()
        gradient = DTensor(local, gradient._spec, requires_grad=False)
    return placement.settled(gradient)


def complete_before_a_fork(tensor):
    """All-reduces the gradient of a tensor if it goes on to several others.

    A gated activation is the product of two. DTensor would all-reduce its
    gradient for each of them.

    Args:
        tensor: DTensor that requires a gradient, and that no layer returned.
    """
    node = tensor.grad_fn
    while node is not None and getattr(node, "number", None) is None:
        below = [to for to, _ in node.next_functions if to is not None]
        if len(below) > 1:
            tensor.register_hook(complete)
            return
        node = below[0] if below else None


def run_first(tensor):
    """Has the node of a tensor run before others that are ready.

    Args:
        tensor: Tensor whose node launches a collective.
    """
    node = tensor.grad_fn
    if node is not None:
        node.number = node._sequence_nr()
        node._set_sequence_nr(_FIRST)


def number_below(tensor):
    """Returns the number of nodes that run while a collective is under way.

    Args:
        tensor: DTensor that a product reads.

    Returns:
        Int; `None` if no collective is launched for the tensor's gradient.
    """
    return getattr(tensor.grad_fn, "number", None)


class _Launch(torch.autograd.Function):
    """The identity. A hook of its output launches the all-reduce."""

    @staticmethod
    def forward(ctx, x):
        return x.detach()

    @staticmethod
    def backward(ctx, gradient):
        return gradient
