"""The largest of values that are split, such as the logits of a vocabulary."""

import math

import torch
from keras.src.backend.torch import core
from keras.src.distribution.distribution_lib import TensorLayout
from keras.src.distribution.distribution_lib import distribution

from keras_tp.backend.torch_xla import placement


def top_k(original, x, k, sorted=True):
    """Finds the candidates of each device's part, then the best of them.

    XLA alone gathers all values. Equal values keep their order in both steps,
    so the result is equal to that of a `top_k` of all values.
    """
    x = core.convert_to_tensor(x)
    parts = _parts() if placement.is_xla(x) and x.ndim else 1
    size = x.shape[-1] if x.ndim else 0
    if parts == 1:
        return original(x, k, sorted=sorted)
    if k * parts * 2 > size or not x.is_floating_point():
        return original(_together(x), k, sorted=sorted)
    # The padding comes after all values that are as small.
    x = torch.nn.functional.pad(x, (0, -size % parts), value=-math.inf)
    values, places = original(x.unflatten(-1, (parts, -1)), k)
    first = torch.arange(parts, device="xla", dtype=places.dtype)
    places = places + first[:, None] * (x.shape[-1] // parts)
    values, chosen = original(values.flatten(-2), k, sorted=sorted)
    places = torch.take_along_dim(places.flatten(-2), chosen.long(), dim=-1)
    return torch.return_types.topk((values, places))


def _together(x):
    """Returns a tensor whose last dim is whole on each device.

    XLA ends the process if it has to split the gradient of `top_k` along it.
    """
    current = distribution()
    axes = [None] * x.ndim
    if x.ndim > 1:
        axes[0] = getattr(current, "batch_dim_name", None)
    layout = TensorLayout(axes, current.device_mesh)
    return placement.constrained(x, placement.to_placement(layout))


def _parts():
    """Returns the number of devices along all axes but the batch's."""
    current = distribution()
    mesh = getattr(current, "device_mesh", None)
    if mesh is None:
        return 1
    batch = getattr(current, "batch_dim_name", None)
    return math.prod(
        size for name, size in zip(mesh.axis_names, mesh.shape) if name != batch
    )
