"""Keras's random initial values, drawn with fewer temporary copies.

A process draws a whole variable and keeps its shard. Keras's own functions
hold three (uniform) to twelve (truncated normal) tensors of the variable's
size at once, which would set the peak memory of a process.
"""

import functools
import math

import torch
from keras.src.backend.config import floatx
from keras.src.backend.torch import core
from keras.src.backend.torch import random
from keras.src.distribution.distribution_lib import distribution

# Numbers drawn at a time. torch draws normal numbers in groups of 16.
PART = 2**16


def uniform(original):
    """Wraps `uniform`: draws one tensor and scales it in place."""

    @functools.wraps(original)
    def uniform(shape, minval=0.0, maxval=1.0, dtype=None, seed=None):
        if not _is_initial(shape, minval, maxval):
            return original(shape, minval, maxval, dtype, seed)
        drawn = torch.rand(
            size=shape,
            generator=random.torch_seed_generator(seed),
            dtype=core.to_torch_dtype(dtype or floatx()),
            device=core.get_device(),
        )
        return drawn.mul_(maxval - minval).add_(minval)

    return uniform


def truncated_normal(original):
    """Wraps `truncated_normal`: draws part by part, four draws per number."""

    @functools.wraps(original)
    def truncated_normal(shape, mean=0.0, stddev=1.0, dtype=None, seed=None):
        if not _is_initial(shape, mean, stddev):
            return original(shape, mean, stddev, dtype, seed)
        generator = random.torch_seed_generator(seed)
        result = torch.empty(
            math.prod(shape), dtype=core.to_torch_dtype(dtype or floatx())
        )
        for part in result.split(_sizes(len(result))):
            draws = torch.normal(
                0.0,
                1.0,
                size=(len(part), 4),
                generator=generator,
                dtype=part.dtype,
            )
            valid = (draws > -2) & (draws < 2)
            first = valid.max(-1, keepdim=True)[1]
            part.copy_(draws.gather(-1, first).squeeze(-1))
        return result.mul_(stddev).add_(mean).reshape(tuple(shape))

    return truncated_normal


def _is_initial(shape, *numbers):
    """Returns whether a draw may be an initial value under a distribution.

    On CUDA a generator's numbers depend on how many are drawn at a time.
    """
    return (
        distribution() is not None
        and core.get_device() == "cpu"
        and math.prod(shape) >= PART
        and all(isinstance(number, (int, float)) for number in numbers)
    )


def _sizes(count):
    """Returns part sizes of at least 16; the last includes the remainder."""
    sizes = [PART] * (count // PART)
    sizes[-1] += count % PART
    return sizes
