"""Parts of variables, read and set in the host's memory for checkpoints."""

import torch

from keras_tp.backend.torch_shared import host_arrays
from keras_tp.backend.torch_xla import placement


def held(variable):
    """Returns each part once; see `distribution_lib.variable_parts`."""
    value = variable._value.detach()
    if not placement.is_xla(value):
        whole = tuple([(0, size)] for size in value.shape)
        return [(whole, True, lambda: host_arrays.to_numpy(value))]
    found = {}
    for _, part, ranges in placement.shards(value):
        key = tuple([limits] for limits in ranges)
        found.setdefault(str(key), (key, part))
    return [
        (ranges, True, lambda part=part: host_arrays.to_numpy(part))
        for ranges, part in found.values()
    ]


@torch.no_grad()
def assign(variable, part_of):
    """Sets the value of a variable; see `distribution_lib.assign_parts`."""
    value = variable._value.detach()
    made = {}

    def tensor_of(ranges):
        key = str(ranges)
        if key not in made:
            array = part_of(tuple([limits] for limits in ranges))
            made[key] = host_arrays.to_tensor(array, value.dtype)
        return made[key]

    whole = [(0, size) for size in value.shape]
    if not placement.is_xla(value) or not placement.is_split(value):
        variable._value.copy_(tensor_of(whole).reshape(value.shape))
        return
    shards = placement.shards(value)
    longest = [
        max(stop - start for start, stop in limits)
        for limits in zip(*(ranges for *_, ranges in shards))
    ]
    loaded = []
    for device, _, ranges in shards:
        sizes = [stop - start for start, stop in ranges]
        part = tensor_of(ranges).reshape(sizes)
        if sizes != longest:
            # XLA's parts are of one size.
            padded = part.new_zeros(longest)
            padded[tuple(map(slice, sizes))] = part
            part = padded
        loaded.append((device, part))
    placement.load(value, loaded)
