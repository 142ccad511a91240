"""Parts of variables, read and set in the host's memory for checkpoints."""

import numpy as np
import tensorflow as tf

from keras_tp.backend import host_memory
from keras_tp.backend.tensorflow import own_memory
from keras_tp.backend.tensorflow import placement
from keras_tp.backend.tensorflow import processes
from keras_tp.backend.tensorflow import variables


def held(variable):
    """Returns the parts on this process's devices, each once.

    See `distribution_lib.variable_parts`.
    """
    value, shape = variable._value, tuple(variable.shape)
    if not variables.is_distributed(variable):
        whole = tuple([(0, size)] for size in shape)
        is_written = processes.index() == 0
        return [(whole, is_written, lambda: value.read_value().numpy())]
    layout = value.layout
    writers = {}
    for device_id in np.ravel(layout.mesh.global_device_ids()):
        slices = placement.shard_slices(layout, shape, device_id)
        writers.setdefault(slices, int(device_id))
    found = {}
    for device_id in layout.mesh.local_device_ids():
        slices = placement.shard_slices(layout, shape, device_id)
        is_written = writers[slices] == int(device_id)
        found[slices] = is_written or found.get(slices, False)

    def read(slices):
        parts = placement.local_parts(value)
        return next(part for _, held, part in parts if held == slices)

    return [
        (
            tuple([limits] for limits in slices),
            is_written,
            lambda slices=slices: read(slices),
        )
        for slices, is_written in found.items()
    ]


def assign(variable, part_of):
    """Sets the value of a variable; see `distribution_lib.assign_parts`."""
    value = variable._value

    def slices_of(slices):
        return part_of(tuple([limits] for limits in slices))

    shape = tuple(variable.shape)
    if not variables.is_distributed(variable):
        with placement.off_mesh():
            value.assign(slices_of(tuple((0, size) for size in shape)))
        return
    # TensorFlow keeps the memory of other values and gives it to new ones.
    is_own = value.has_own_memory()
    tensor_of = own_memory.tensor_of if is_own else tf.constant
    value.assign(
        placement.place_parts(slices_of, shape, value.layout, tensor_of)
    )
    if is_own:
        value.note_memory()
        host_memory.give_back()
