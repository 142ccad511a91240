"""Checks of user arguments; each error says what to write instead."""

import inspect

from keras import Layer
from keras.src.distribution import distribution_lib as keras_lib

from keras_tp.distribution import device_mesh as meshes


def check_distribution(value):
    """Raises `ValueError` unless a distribution can be used here.

    It may be one of Keras. Warns once per process if only one device was found.
    """
    if not isinstance(value, keras_lib.Distribution):
        raise ValueError(
            "`distribution` must be a distribution, such as "
            "`TensorParallel()`. "
            f"{_instead_of(value)}{_received('distribution', value)}"
        )
    mesh = value.device_mesh
    if isinstance(mesh, keras_lib.DeviceMesh):
        meshes.check_devices_of(mesh)
        meshes.say_if_alone(mesh)


def check_mesh(value):
    """Raises `ValueError` unless a value is a `DeviceMesh`, also of Keras."""
    if not isinstance(value, keras_lib.DeviceMesh):
        raise ValueError(
            "Expect `device_mesh` to be an instance of `DeviceMesh`, such as "
            f"`DeviceMesh((1, 4), ['batch', 'model'])`. {_instead_of(value)}"
            f"{_received('device_mesh', value)}"
        )


def check_layout_map(value):
    """Raises `ValueError` unless a value is a `LayoutMap` with a mesh."""
    if value is None:
        raise ValueError(
            "You must specify a layout_map argument: write "
            "`ModelParallel(layout_map=layout_map)`, or `TensorParallel()`, "
            "which needs none. Received: layout_map=None"
        )
    if not isinstance(value, keras_lib.LayoutMap):
        advice = _instead_of(value)
        if isinstance(value, dict):
            advice = (
                "Write `layout_map = LayoutMap(device_mesh)`, and "
                "`layout_map.update(...)` with this dict. "
            )
        raise ValueError(
            "Argument `layout_map` must be a `LayoutMap` instance. "
            f"{advice}{_received('layout_map', value)}"
        )
    if value.device_mesh is None:
        raise ValueError(
            "The LayoutMap of a ModelParallel needs a mesh: write "
            "`LayoutMap(device_mesh)`. Received: layout_map.device_mesh=None"
        )


def check_model(value, function):
    """Raises `ValueError` unless a value is a Keras model or layer."""
    if not isinstance(value, Layer):
        raise ValueError(
            f"`{function}` takes an existing Keras model. Received: "
            f"model={value!r} (of type {type(value)})"
        )


def _instead_of(value):
    """Returns a sentence that says how to use a value, or an empty string."""
    if inspect.isclass(value) and issubclass(value, keras_lib.Distribution):
        is_map = value.__name__ == "ModelParallel"
        inside = "layout_map=layout_map" if is_map else ""
        return (
            f"Write `{value.__name__}({inside})`: an instance, not the class. "
        )
    if isinstance(value, keras_lib.DeviceMesh):
        return (
            "Write `TensorParallel(device_mesh)` to split a model over the "
            "mesh, or `DataParallel(device_mesh)` to split its batches. "
        )
    if isinstance(value, keras_lib.LayoutMap):
        return "Write `ModelParallel(layout_map=layout_map)`. "
    if hasattr(value, "how_to_use"):
        return f"{value.how_to_use} "
    if isinstance(value, keras_lib.Distribution):
        return "Write `distribution.device_mesh`. "
    if isinstance(value, Layer):
        return (
            "Write `distribute_model(model, TensorParallel())` for an existing "
            "model. "
        )
    if isinstance(value, int) and not isinstance(value, bool):
        return (
            "Write `TensorParallel(DeviceMesh((n,), ['model'], "
            f"list_devices()[:n]))` for the first n={value} devices. "
        )
    if isinstance(value, (list, tuple)) and value:
        return (
            f"Write `TensorParallel(DeviceMesh(({len(value)},), ['model'], "
            "devices))` for a list of devices. "
        )
    if isinstance(value, str):
        return "Write `TensorParallel()` for a plan over all devices. "
    return ""


def check_batch_axis(device_mesh, name):
    """Raises `ValueError` unless a mesh has the axis for batches."""
    names = list(device_mesh.axis_names)
    if name not in names:
        raise ValueError(
            f"`batch_dim_name` must be one of the mesh axes {names}. "
            f"Received: batch_dim_name={name!r}"
        )


def check_gather_outputs(value):
    """Raises `ValueError` unless a value is a number of bytes, or `None`."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if value is not None and not (is_number and value >= 0):
        raise ValueError(
            "`gather_outputs` must be the least bytes of a kernel for which "
            "the output of its layer may be gathered, such as 2**20, or "
            f"`None` to gather none.{_received('gather_outputs', value)}"
        )


def _received(name, value):
    return f"Received: {name}={value!r} (of type {type(value)})"
