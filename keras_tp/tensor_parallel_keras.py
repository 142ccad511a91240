"""Tensor parallelism for an existing model, in one call.

A thin wrapper: `TensorParallel` makes the plan, `distribute_model` moves the
model, and `describe` makes the reports.
"""

import types

import keras

from keras_tp import backend
from keras_tp.distribution import distribution_lib
from keras_tp.distribution.planning.planner import MODEL_AXIS
from keras_tp.distribution.report import ShardingReport
from keras_tp.distribution.report import describe
from keras_tp.distribution.sharded_model import distribute_model
from keras_tp.distribution.tensor_parallel import TensorParallel
from keras_tp.distribution.variable_origin import SLOT
from keras_tp.distribution.variable_origin import WEIGHT

# Values of `distributed_backend`, and the Keras backend that each needs.
_KERAS_BACKENDS = {
    "jax": "jax",
    "tensorflow": "tensorflow",
    "torch": "torch",
    "pytorch": "torch",
    "nccl": "torch",
    "gloo": "torch",
}

# The values that are communication libraries, and their type of devices.
_LIBRARIES = {"nccl": "GPUs", "gloo": "CPUs"}

_REFUSED = {
    "horovod": (
        "Horovod reduces the gradients of whole copies of a model; it does "
        "not split one."
    ),
    "fallback": (
        "There is no fallback: keras_tp does not simulate missing devices."
    ),
}


class _IsSharded(type):
    """Makes `isinstance` true for the models that the class was called on.

    A model keeps its own class. Files, configs, `clone_model` and pickles
    therefore name the plain class.
    """

    def __instancecheck__(cls, instance):
        return isinstance(instance, keras.Model) and (
            "get_gradient_sharding_info" in vars(instance)
        )


class TensorParallelKeras(metaclass=_IsSharded):
    """Splits an existing model, trained or not, over devices.

    The call plans the model and moves it in place. Weights, optimizer slots,
    metrics and random state move one at a time and keep their values. The
    call returns **the same object**. Its class, paths, compile state, summary
    and files do not change. `isinstance` is true for its own class and for
    this one. A model that is loaded from its files is a plain model.

    This is `distribute_model(model, TensorParallel(mesh))` for a mesh of one
    axis. Use these two for overrides, for a second axis that splits the batch,
    and to bring the model back to one device.

    In a run of several processes, every process must call this and the two
    methods.

    Example:

    ```python
    model = keras.models.load_model("model.keras")
    model = TensorParallelKeras(model, world_size=4)
    model.fit(x, y)
    ```

    Args:
        model: A built Keras model.
        world_size: Int, the number of devices. Defaults to the length of
            `device_ids`, or all devices that `list_devices()` finds.
        device_ids: List of strings, such as `["gpu:0", "gpu:1"]`, as
            `list_devices()` spells them. Defaults to the first `world_size`
            of them.
        distributed_backend: String. Keras's backend determines how tensors
            move; this argument only checks it. One of `"auto"` (no check),
            `"jax"`, `"tensorflow"`, `"torch"` (or `"pytorch"`), and, on
            torch, the library of the process group, `"nccl"` or `"gloo"`.
            Defaults to `"auto"`.

    Returns:
        The same model, with these attributes:

        - `world_size`: Int, as resolved by this call.
        - `device_ids`: Tuple of strings, as resolved by this call.
        - `get_parallelism_info`: see below.
        - `get_gradient_sharding_info`: see below.

    Raises:
        ValueError: if `model` is not a built Keras model; `world_size` exceeds
            the number of devices; a device is unknown or listed twice; or
            `distributed_backend` is unknown or not the one in use. The model
            is then unchanged.
    """

    def __new__(
        cls,
        model,
        world_size=None,
        device_ids=None,
        distributed_backend="auto",
    ):
        if not isinstance(model, keras.Model):
            raise ValueError(
                "`TensorParallelKeras` takes an existing `keras.Model`. To "
                "shard a model while it is built, set a "
                "`keras_tp.distribution.TensorParallel`. Received: "
                f"model={model} (of type {type(model)})"
            )
        _check_backend(distributed_backend)
        devices = _resolve_devices(world_size, device_ids)
        is_asked = world_size is not None or device_ids is not None
        mesh = distribution_lib.DeviceMesh(
            (len(devices),), [MODEL_AXIS], devices if is_asked else None
        )
        if distributed_backend in _LIBRARIES:
            _check_library(distributed_backend, devices)
        distribute_model(model, TensorParallel(mesh))
        # `Layer.__setattr__` would track them as parts of the model.
        vars(model).update(
            world_size=len(devices),
            device_ids=tuple(devices),
            get_parallelism_info=types.MethodType(
                cls.get_parallelism_info, model
            ),
            get_gradient_sharding_info=types.MethodType(
                cls.get_gradient_sharding_info, model
            ),
        )
        return model

    def get_parallelism_info(self):
        """Reports how the weights are split over the devices.

        Returns:
            Dict, as `describe(model).to_dict()`, of the model's weights only.
        """
        return _part_of_report(self, lambda row: row.role == WEIGHT)

    def get_gradient_sharding_info(self):
        """Reports how trainable weights and optimizer slots are split.

        Each device applies its part of a gradient to its part of the variable
        and of the variable's slots.

        Returns:
            Dict, as `describe(model).to_dict()`, of the trainable weights and
            the optimizer state only.
        """
        trainable = {variable.path for variable in self.trainable_weights}
        return _part_of_report(
            self,
            lambda row: (
                row.role == SLOT
                or (row.role == WEIGHT and row.path in trainable)
            ),
        )


def _part_of_report(model, is_part):
    report = describe(model)
    rows = [row for row in report.rows if is_part(row)]
    return ShardingReport(report.model_name, rows).to_dict()


def _check_backend(name):
    choices = ["auto", *_KERAS_BACKENDS]
    if name not in choices:
        raise ValueError(
            f"{_REFUSED.get(str(name), 'This backend is unknown.')} Set "
            '`distributed_backend` to "auto", or to the backend of this run, '
            f"{keras.config.backend()!r}. Known: {choices}. Received: "
            f"distributed_backend={name!r}"
        )
    runs, needs = keras.config.backend(), _KERAS_BACKENDS.get(name)
    if needs not in (None, runs):
        raise ValueError(
            f"distributed_backend={name!r} needs Keras on {needs!r}. Set the "
            f"environment variable KERAS_BACKEND={needs} before Keras is "
            'imported, or set `distributed_backend="auto"`. Received: '
            f"distributed_backend={name!r}; keras.config.backend()={runs!r}"
        )


def _resolve_devices(world_size, device_ids):
    """Returns the list of device names. Given names are not looked up."""
    if world_size is not None and (
        not isinstance(world_size, int)
        or isinstance(world_size, bool)
        or world_size < 1
    ):
        raise ValueError(
            "`world_size` must be the number of devices, an int of 1 or more, "
            f"or None for all devices. Received: world_size={world_size!r}"
        )
    if device_ids is None:
        available = distribution_lib.list_devices()
        if world_size is not None and world_size > len(available):
            way_out = backend.distribution_lib.how_to_launch(world_size)
            raise ValueError(
                f"Set `world_size` to {len(available)} or less: there are no "
                f"more devices here. {way_out} Received: "
                f"world_size={world_size}; devices={available}"
            )
        return available[:world_size]
    if (
        not isinstance(device_ids, (list, tuple))
        or not device_ids
        or not all(isinstance(device, str) for device in device_ids)
    ):
        raise ValueError(
            "`device_ids` must be a list of names as `list_devices()` returns "
            f"them, such as {distribution_lib.list_devices()[:2]}. Received: "
            f"device_ids={device_ids!r}"
        )
    if world_size not in (None, len(device_ids)):
        raise ValueError(
            "`world_size` must be the number of `device_ids`; leave one of "
            f"them out. Received: world_size={world_size}; "
            f"device_ids={device_ids}"
        )
    if len({device.split(":")[0].lower() for device in device_ids}) > 1:
        raise ValueError(
            "`device_ids` must be devices of one type. Received: "
            f"device_ids={device_ids}"
        )
    return [device.lower() for device in device_ids]


def _check_library(name, devices):
    device_type = devices[0].split(":")[0]
    runs = backend.distribution_lib.collective_library(device_type)
    if runs != name:
        raise ValueError(
            f"distributed_backend={name!r} communicates between "
            f"{_LIBRARIES[name]}, but the process group of this run uses "
            f'{runs!r} for {devices}. Set `distributed_backend="{runs}"` or '
            f'"auto", or start the process group with {name!r} before. '
            f"Received: distributed_backend={name!r}"
        )
