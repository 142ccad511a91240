"""Keras's random functions, drawn in the host's memory.

torch has no generator for XLA's devices. So the numbers are those of torch on
one CPU, and each device takes its part of them.
"""

import functools

import torch
from keras.src import tree
from keras.src.backend.torch import core

from keras_tp.backend.torch_xla import placement

NAMES = ("beta", "binomial", "categorical", "gamma", "normal", "randint")
NAMES += ("shuffle", "truncated_normal", "uniform")


def hook_draw(original):
    """Draws on the host, and moves the numbers to the devices."""

    @functools.wraps(original)
    def draw(*args, **kwargs):
        if not core.get_device().startswith("xla"):
            return original(*args, **kwargs)
        args, kwargs = tree.map_structure(_on_host, (args, kwargs))
        with core.device_scope("cpu"):
            drawn = original(*args, **kwargs)
        return drawn.to(core.get_device())

    return draw


def hook_dropout(original):
    """Draws the mask of a dropout on the host."""

    @functools.wraps(original)
    def dropout(inputs, rate, noise_shape=None, seed=None):
        if rate in (0.0, 1.0) or not placement.is_xla(inputs):
            return original(inputs, rate, noise_shape, seed)
        with core.device_scope("cpu"):
            # Zeros, and numbers that make up for them.
            factors = original(
                torch.ones(inputs.shape), rate, noise_shape, seed
            )
        return inputs * factors.to(core.get_device(), inputs.dtype)

    return dropout


def _on_host(value):
    return value.cpu() if placement.is_xla(value) else value
