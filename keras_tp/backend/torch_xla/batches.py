"""Splits batches over the devices."""

import math

import numpy as np
import torch
from keras.src import tree
from keras.src.backend.torch import core
from keras.src.distribution.distribution_lib import distribution

from keras_tp.backend.torch_xla import placement


def distribute_batch(data):
    """Returns a batch, each array of it laid out by the current distribution.

    Args:
        data: Structure of arrays, the global batch.
    """
    current = distribution()
    if current is None:
        return data

    def place(array):
        if not isinstance(array, (torch.Tensor, np.ndarray)) or not array.ndim:
            return array
        layout = current.get_data_layout(tuple(array.shape))
        return split_batch(array, placement.as_placement(layout))

    return tree.map_structure(place, data)


def split_batch(array, placed):
    """Returns an array as a tensor on the devices.

    Args:
        array: Array or tensor.
        placed: `Placement`. An array that it cannot split evenly, such as the
            last batch of an epoch, is whole on each device.
    """
    tensor = core.convert_to_tensor(array)
    if placed.mesh is None:
        return tensor
    sizes = placed.mesh.shape()
    for size, axis in zip(tensor.shape, placed.axes):
        if size % math.prod(sizes[n] for n in placement.names_of(axis)):
            return tensor
    if placement.is_xla(array):
        # The caller's own tensor keeps its layout.
        return placement.constrained(array, placed)
    return placement.mark(tensor.to("xla"), placed)
