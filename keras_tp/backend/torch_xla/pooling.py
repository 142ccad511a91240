"""Max pooling whose windows may cross from one device to the next."""

import torch
from torch.nn import functional

from keras_tp.backend.torch_xla import placement


def max_pool(original, x, kernel_size, stride=None, padding=0, *args, **kwargs):
    """Wraps `torch.nn.functional.max_pool1d`, 2d and 3d.

    XLA's partitioner computes a wrong gradient if windows overlap, have stride
    1, and cross the border of two devices. Such windows are compared element
    by element here; whatever is split stays split.

    Args:
        original: Callable.
        x: Tensor of shape (batch, channels, dims that are pooled).
        kernel_size: Int, or one for each dim that is pooled.
        stride: Int, or one for each dim. Defaults to `kernel_size`.
        padding: Int, or one for each dim. Defaults to `0`.
        args: Further arguments of `original`, as `kwargs` are.
    """
    stride = kernel_size if stride is None else stride
    rank = x.ndim - 2
    steps, sizes, ends = (
        value if isinstance(value, (list, tuple)) else (value,) * rank
        for value in (stride, kernel_size, padding)
    )
    crosses = any(s == 1 < size for s, size in zip(steps, sizes))
    if not placement.is_xla(x) or not crosses or args or kwargs:
        return original(x, kernel_size, stride, padding, *args, **kwargs)
    # From the last dim on: of equal elements, the first gets the gradient.
    for index in reversed(range(rank)):
        x = _along(x, 2 + index, steps[index], sizes[index], ends[index])
    return x


def _along(x, dim, step, size, end):
    """Pools one dim."""
    if end:
        around = [0] * (2 * (x.ndim - dim - 1)) + [end, end]
        x = functional.pad(x, around, value=float("-inf"))
    stop = x.shape[dim] - size + 1
    parts = [
        x[(slice(None),) * dim + (slice(start, start + stop, step),)]
        for start in range(size)
    ]
    largest = parts[0]
    for part in parts[1:]:
        largest = torch.where((part > largest) | part.isnan(), part, largest)
    return largest
