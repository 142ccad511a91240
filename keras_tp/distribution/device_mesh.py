"""Meshes, and checks that their devices are available."""

import collections
import math
import re
import warnings

import numpy as np
from keras.src.distribution import distribution_lib as keras_lib

from keras_tp import backend

# Such a name may refer to another machine's device. Others must be here.
_KNOWN_DEVICE = re.compile(r"(cpu|gpu|tpu):\d+")

# The mesh of the warning about one device, which a process gives once.
_said_alone = []


class DeviceMesh(keras_lib.DeviceMesh):
    """A grid of devices with named axes.

    Works as `keras.distribution.DeviceMesh`. Listed devices need not be
    available, so a model can be planned for another machine. They are looked
    up when a distribution with the mesh is set or entered, or when a value is
    placed on the mesh.

    Example:

    ```python
    mesh = DeviceMesh((2, 4), ["batch", "model"])
    ```

    Args:
        shape: Tuple of ints, number of devices along each axis.
        axis_names: List of strings, one for each axis.
        devices: List of device names, as many as the product of `shape`.
            Defaults to all of `list_devices()`.

    Raises:
        ValueError: if the number of devices differs from the product of
            `shape`, or a device is unknown or listed twice.
    """

    def __init__(self, shape, axis_names, devices=None):
        if isinstance(shape, int):
            raise ValueError(
                "`shape` must be a tuple with the size of each axis: write "
                f"`({shape},)` for one axis. Received: shape={shape}"
            )
        if isinstance(axis_names, str) and axis_names:
            raise ValueError(
                "`axis_names` must be a list with the name of each axis: write "
                f"`[{axis_names!r}]` for one axis. Received: "
                f"axis_names={axis_names!r}"
            )
        listed = devices is not None
        devices = np.array(
            listed_devices(devices)
            if listed
            else backend.distribution_lib.list_devices()
        )
        given = [str(device) for device in devices.flatten()]
        count = math.prod(shape) if shape else 0
        if count and len(shape) == len(axis_names) and count != len(given):
            raise ValueError(
                "Shape does not match the number of devices. A mesh of shape "
                f"{tuple(shape)} has {count} devices, and {len(given)} are "
                f"{'listed' if listed else 'available'}. "
                f"{'' if listed else _way_out(count)}Received: "
                f"shape={tuple(shape)}; devices={given}"
            )
        counted = collections.Counter(name.lower() for name in given)
        repeated = [name for name, k in counted.items() if k > 1]
        if repeated:
            raise ValueError(
                "A mesh can hold a device only once. Repeated: "
                f"{repeated}. Received: devices={given}"
            )
        _check_devices(devices, lambda name: not _KNOWN_DEVICE.fullmatch(name))
        super().__init__(shape, axis_names, devices)
        # A mesh of the only device found is probably a mistake.
        self._is_alone = not listed and len(given) == 1

    @property
    def backend_mesh(self):
        if not hasattr(self, "_backend_mesh"):
            check_devices_of(self)
            lib = backend.distribution_lib
            self._backend_mesh = lib._to_backend_mesh(self)
        return self._backend_mesh


def mesh_of_first_devices(shape, names):
    """Returns a `DeviceMesh` of the first devices, here or not.

    If too few are here, it has the names that the next ones would have.

    Args:
        shape: Tuple of ints, sizes of the axes.
        names: List of strings, names of the axes.
    """
    count, devices = math.prod(shape), backend.distribution_lib.list_devices()
    kind = devices[0].partition(":")[0]
    devices += [f"{kind}:{index}" for index in range(len(devices), count)]
    return DeviceMesh(shape, names, devices[:count])


def listed_devices(devices):
    """Returns `devices` as a list; `ValueError` if it is not one, or empty."""
    is_list = isinstance(devices, (list, tuple, np.ndarray))
    if not is_list or not len(devices):
        raise ValueError(
            "`devices` must be a list of names as `list_devices()` returns "
            f"them: {backend.distribution_lib.list_devices()[:4]}. Received: "
            f"devices={devices!r}"
        )
    return list(devices)


def check_devices_of(device_mesh):
    """Raises `ValueError` if a device of a mesh is not available."""
    if not getattr(device_mesh, "_is_here", False):
        _check_devices(device_mesh.devices, lambda name: True)
        device_mesh._is_here = True


def say_if_alone(device_mesh):
    """Warns, once per process, that a mesh has only the one device found."""
    if not getattr(device_mesh, "_is_alone", False) or _said_alone:
        return
    _said_alone.append(device_mesh)
    device = str(device_mesh.devices.flatten()[0])
    warnings.warn(
        f"There is only one device here, {device!r}, so nothing is split. "
        f"{_way_out(2)}To use one device without this warning, list it: "
        f"`DeviceMesh({tuple(device_mesh.shape)}, "
        f"{list(device_mesh.axis_names)}, [{device!r}])`.",
        stacklevel=6,
    )


def warn_if_unsplit(device_mesh, axes):
    """Warns that no mesh axis of size above 1 splits variables.

    `axes` lists the mesh axes that do. A mesh of one device gives no warning.
    """
    count = math.prod(device_mesh.shape)
    if count == 1:
        return
    names, shape = list(device_mesh.axis_names), list(device_mesh.shape)
    if axes:
        split = ", ".join(f"{name!r} of size 1" for name in axes)
        why = f"the mesh axis that splits variables is {split}"
        # Suggest a mesh with the largest size on this axis.
        here, there = names.index(axes[0]), shape.index(max(shape))
        shape[here], shape[there] = shape[there], shape[here]
    else:
        why = f"no mesh axis splits variables: {names} split batches"
        names, shape = ["model"], [count]
    warnings.warn(
        f"Each of the {count} devices holds every variable whole: {why}. To "
        f"split them, write `DeviceMesh({tuple(shape)}, {names})`. To split "
        "only the batch, use `DataParallel()`, which does not give this "
        f"warning. Received: device_mesh={device_mesh}",
        stacklevel=4,
    )


def _check_devices(devices, is_asked):
    """Raises `ValueError` if a device to look up is not available."""
    names = devices.flatten().tolist()
    # Only names are looked up: a device object of the framework exists.
    asked = [n for n in names if isinstance(n, str) and is_asked(n.lower())]
    here = {}
    for name in asked:
        kind, _, number = name.lower().partition(":")
        if kind not in here:
            here[kind] = _devices_here(kind)
        if name.lower() in here[kind]:
            continue
        if here[kind]:
            numbers = [int(n.rpartition(":")[2]) for n in names if _number(n)]
            count = max([n + 1 for n in numbers], default=len(names))
            found = f"Devices of its type here: {here[kind]}. {_way_out(count)}"
        else:
            found = (
                f"There are no devices of type {kind!r} here, only "
                f"{backend.distribution_lib.list_devices()}. A mesh of other "
                "devices is for plans only; no tensor can be placed on it. "
            )
        raise ValueError(
            f"Unknown device {name!r}. {found}Received: devices={names}"
        )


def _number(name):
    return isinstance(name, str) and name.rpartition(":")[2].isdigit()


def _devices_here(kind):
    try:
        return backend.distribution_lib.list_devices(kind)
    except ValueError:
        return []


def _way_out(count):
    return backend.distribution_lib.how_to_launch(count) + " "
