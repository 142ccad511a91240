"""Parts of variables, read and set in the host's memory for checkpoints."""

import ml_dtypes
import numpy as np
import torch

from keras_tp.backend.torch_xla import placement

# numpy reads these as integers of the same size.
_AS_INTEGERS = {
    torch.bfloat16: (torch.int16, ml_dtypes.bfloat16),
    torch.float8_e4m3fn: (torch.uint8, ml_dtypes.float8_e4m3fn),
    torch.float8_e5m2: (torch.uint8, ml_dtypes.float8_e5m2),
}


def held(variable):
    """Returns each part once; see `distribution_lib.variable_parts`."""
    value = variable._value.detach()
    if not placement.is_xla(value):
        whole = tuple([(0, size)] for size in value.shape)
        return [(whole, True, lambda: _to_numpy(value))]
    found = {}
    for _, part, ranges in placement.shards(value):
        key = tuple([limits] for limits in ranges)
        found.setdefault(str(key), (key, part))
    return [
        (ranges, True, lambda part=part: _to_numpy(part))
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
            made[key] = _to_tensor(array, value.dtype)
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


def _to_numpy(tensor):
    tensor = tensor.cpu()
    if tensor.dtype in _AS_INTEGERS:
        integers, dtype = _AS_INTEGERS[tensor.dtype]
        return tensor.view(integers).numpy().view(dtype)
    return tensor.numpy()


def _to_tensor(array, dtype):
    array = np.ascontiguousarray(array)
    if dtype in _AS_INTEGERS:
        integers, _ = _AS_INTEGERS[dtype]
        array = array.view(f"{integers}".removeprefix("torch."))
        return torch.from_numpy(array).view(dtype)
    return torch.from_numpy(array)
