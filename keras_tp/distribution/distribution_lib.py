"""Meshes, layouts, distributions and the global setting.

The classes are subclasses of Keras's, and the functions are thin delegates:
`keras_tp.backend` does the work for the framework in use.
"""

import warnings

from keras import tree
from keras.src.backend.common.keras_tensor import KerasTensor
from keras.src.backend.common.name_scope import current_path
from keras.src.distribution import distribution_lib as keras_lib

from keras_tp import backend
from keras_tp.backend import hooks
from keras_tp.backend.processes import supervisor
from keras_tp.distribution import arguments
from keras_tp.distribution import derived_variables
from keras_tp.distribution import model_hooks
from keras_tp.distribution.device_mesh import DeviceMesh
from keras_tp.distribution.device_mesh import listed_devices
from keras_tp.distribution.device_mesh import warn_if_unsplit
from keras_tp.distribution.layout_map import LayoutMap
from keras_tp.distribution.tensor_layout import TensorLayout
from keras_tp.distribution.tensor_layout import axis_names
from keras_tp.distribution.tensor_layout import axis_size
from keras_tp.distribution.tensor_layout import axis_sizes
from keras_tp.distribution.tensor_layout import batch_replicated_if_uneven
from keras_tp.distribution.tensor_layout import check_layout
from keras_tp.distribution.tensor_layout import is_uneven
from keras_tp.distribution.variable_origin import WEIGHT
from keras_tp.distribution.variable_origin import current_root
from keras_tp.distribution.variable_origin import origin_of

DEFAULT_BATCH_DIM_NAME = keras_lib.DEFAULT_BATCH_DIM_NAME

# Keras's global setting, which keras_tp shares.
distribution = keras_lib.distribution


def list_devices(device_type=None):
    """Returns the names of the devices of all processes.

    Args:
        device_type: String, one of `"cpu"`, `"gpu"` and `"tpu"`. Defaults to
            the accelerator if there is one, else `"cpu"`.

    Returns:
        List of strings, such as `["gpu:0", "gpu:1"]`.

    Raises:
        ValueError: if the backend has no devices of this type.
    """
    return backend.distribution_lib.list_devices(device_type)


def get_device_count(device_type=None):
    """Returns the number of devices of all processes.

    Args:
        device_type: String, one of `"cpu"`, `"gpu"` and `"tpu"`. Defaults to
            the accelerator if there is one, else `"cpu"`.

    Returns:
        Int, the length of `list_devices(device_type)`.
    """
    return backend.distribution_lib.get_device_count(device_type)


def initialize(job_addresses=None, num_processes=None, process_id=None):
    """Joins this process to the others of a run over several processes.

    Call this before any computation. An argument that is not given is read
    from the environment: `KERAS_DISTRIBUTION_JOB_ADDRESSES`,
    `KERAS_DISTRIBUTION_NUM_PROCESSES`, `KERAS_DISTRIBUTION_PROCESS_ID`. If a
    variable is not set, the value is detected: JAX from SLURM, Open MPI or
    Kubernetes; torch from torchrun's variables, then from Open MPI or SLURM;
    TensorFlow from `DTENSOR_*`, then likewise. The call does nothing if no
    source names other processes, or if this process has joined them already.
    On JAX and TensorFlow, an uncaught error in one process then ends all.

    Args:
        job_addresses: String, comma-separated `host:port` of the processes.
            JAX and torch need only the address of process 0.
        num_processes: Int, number of processes.
        process_id: Int from 0 to `num_processes - 1`.

    Raises:
        ValueError: if the arguments are incomplete or contradict each other.
        RuntimeError: if a process does not join within `KERAS_TP_TIMEOUT`
            seconds, by default 45.
    """
    backend.distribution_lib.initialize(
        *supervisor.place_in_run(job_addresses, num_processes, process_id)
    )


class Distribution(keras_lib.Distribution):
    """Base class of the distributions: a mesh, and the axis for batches.

    Args:
        device_mesh: `DeviceMesh`.
        batch_dim_name: String, mesh axis that splits the first dim of the
            data. Defaults to `None`.
        auto_shard_dataset: Boolean, for runs of several processes. If `True`,
            each process is given the whole data, of any kind, and its devices
            take their part of every batch. If `False`, each process is given
            only its own part, as by a sharded loader; `data_shard_id` is the
            index of the part. Defaults to `True`.
    """

    def __init__(
        self, device_mesh, batch_dim_name=None, auto_shard_dataset=True
    ):
        super().__init__(device_mesh, batch_dim_name, auto_shard_dataset)
        self._num_processes = backend.distribution_lib.num_processes()
        self._process_id = backend.distribution_lib.process_id()
        self._is_multi_process = self._num_processes > 1

    def get_data_layout(self, data_shape):
        axes = [None] * len(data_shape)
        if axes:
            axes[0] = self.batch_dim_name
        return TensorLayout(axes, self.device_mesh)

    def get_variable_layout(self, variable):
        if getattr(variable, "_layout", None) is not None:
            return variable._layout
        return self._replicated(variable.shape)

    def get_tensor_layout(self, path):
        return None

    def can_check(self, model):
        """Returns whether a built model can be checked already."""
        return True

    def check_model(self, model):
        """Warns about layouts that do not fit a model; raises if strict.

        Called once for each outermost model, before its first compile, fit or
        call. The base class has nothing to check.

        Args:
            model: A built Keras model.
        """

    def _replicated(self, shape):
        return TensorLayout([None] * len(shape), self.device_mesh)

    @property
    def num_model_replicas(self):
        return axis_size(self.device_mesh, self.batch_dim_name)

    def scope(self):
        """Context manager that makes this distribution the current one."""
        install()
        return super().scope()


class DataParallel(keras_lib.DataParallel, Distribution):
    """Distribution that splits the batch and replicates the variables.

    Works as `keras.distribution.DataParallel`.

    Example:

    ```python
    set_distribution(DataParallel())
    ```

    Args:
        device_mesh: `DeviceMesh` of one axis. If it has several, the first
            axis splits the batch, with a warning. Defaults to `None`.
        devices: List of device names for a mesh of one axis. Defaults to all
            of `list_devices()`.
        auto_shard_dataset: Boolean. Whether each of several processes is
            given the whole data; see `Distribution`. Defaults to `True`.
    """

    def __init__(self, device_mesh=None, devices=None, auto_shard_dataset=True):
        if device_mesh is None:
            found = list_devices() if devices is None else None
            devices = listed_devices(found or devices)
            names = [DEFAULT_BATCH_DIM_NAME]
            device_mesh = DeviceMesh((len(devices),), names, devices)
            # The devices were found, not listed by the user.
            device_mesh._is_alone = found is not None and len(found) == 1
        arguments.check_mesh(device_mesh)
        super().__init__(device_mesh, auto_shard_dataset=auto_shard_dataset)

    def _initialize_with_device_mesh(self, device_mesh, auto_shard_dataset):
        Distribution.__init__(
            self, device_mesh, device_mesh.axis_names[0], auto_shard_dataset
        )
        if len(device_mesh.shape) != 1:
            warnings.warn(
                "Expect the input mesh to be 1D, but received "
                f"mesh.devices.ndim={len(device_mesh.shape)}. The first axis "
                "will be used for data-parallel sharding.",
                stacklevel=3,
            )

    # Only the batch axis makes replicas; Keras counts all devices of the mesh.
    num_model_replicas = Distribution.num_model_replicas
    get_data_layout = Distribution.get_data_layout
    get_variable_layout = Distribution.get_variable_layout


@hooks.around
def _keywords_only(original, self, /, *args, **kwargs):
    """Refuses positional arguments; the error says what to write instead."""
    if args:
        raise ValueError(
            "ModelParallel takes keyword arguments only: write "
            "`ModelParallel(layout_map=layout_map)`, with the mesh in the "
            f"map: `LayoutMap(device_mesh)`. Received: {args}"
        )
    original(self, **kwargs)


class ModelParallel(keras_lib.ModelParallel, Distribution):
    """Distribution that splits variables as a `LayoutMap` declares.

    Works as `keras.distribution.ModelParallel`, but without its silent
    failures: `LayoutMap` lists the warnings about a model. A layout that does
    not fit its variable (rank, divisibility) is a `ValueError` when the
    variable is made. Optimizer slots take the layout of their variable.
    Metrics and random state are replicated, even if a pattern matches them.

    Example:

    ```python
    mesh = DeviceMesh((1, 4), ["batch", "model"])
    layout_map = LayoutMap(mesh)
    layout_map[".*up/kernel"] = (None, "model")
    layout_map[".*down/kernel"] = ("model", None)
    set_distribution(ModelParallel(layout_map=layout_map))
    ```

    Args:
        layout_map: `LayoutMap`.
        batch_dim_name: String, mesh axis that splits the first dim of the
            data. Defaults to the first axis of the mesh.
        auto_shard_dataset: Boolean. Whether each of several processes is
            given the whole data; see `Distribution`. Defaults to `True`.
        **kwargs: `shard_optimizer=False`: Boolean, whether slots are split
            over the batch axis too (ZeRO-1), along their largest replicated
            dim that divides evenly. `device_mesh`: the mesh of the map.

    Raises:
        ValueError: if the map has no mesh, `device_mesh` is another one, or
            `batch_dim_name` is not one of its axes.
    """

    @_keywords_only
    def __init__(
        self,
        *,
        layout_map=None,
        batch_dim_name=None,
        auto_shard_dataset=True,
        **kwargs,
    ):
        device_mesh = kwargs.pop("device_mesh", None)
        self.shard_optimizer = kwargs.pop("shard_optimizer", False)
        if kwargs:
            raise TypeError(
                "ModelParallel got unexpected keyword arguments: "
                f"{sorted(kwargs)}"
            )
        arguments.check_layout_map(layout_map)
        if device_mesh not in (None, layout_map.device_mesh):
            raise ValueError(
                "A ModelParallel uses the mesh of its LayoutMap. Received: "
                f"device_mesh={device_mesh}, and a LayoutMap on "
                f"{layout_map.device_mesh}"
            )
        if batch_dim_name is not None:
            arguments.check_batch_axis(layout_map.device_mesh, batch_dim_name)
        super().__init__(
            layout_map=LayoutMap.from_keras(layout_map),
            batch_dim_name=batch_dim_name,
            auto_shard_dataset=auto_shard_dataset,
        )

    get_data_layout = Distribution.get_data_layout

    def get_variable_layout(self, variable):
        if getattr(variable, "_layout", None) is not None:
            return variable._layout
        layout = None
        shape, origin = tuple(variable.shape), origin_of(variable)
        # A scalar has no dim to split, even if a pattern matches it.
        if origin.role == WEIGHT and shape:
            layout = self._layout_map.layout_for(variable.path, origin.root)
            layout = derived_variables.layout_for(variable, layout)
            if layout is not None and 0 not in shape:
                what = f"variable {variable.path!r}"
                uneven = getattr(layout, "uneven", False)
                check_layout(layout, shape, what, uneven)
                layout = self._possible(layout, variable)
        return self._replicated(shape) if layout is None else layout

    def _possible(self, layout, variable):
        """Returns a layout without the splits that the backend lacks."""
        shape = tuple(variable.shape)
        lib = backend.distribution_lib
        blocks = getattr(layout, "blocks", {})
        uneven = not lib.splits_unevenly() and is_uneven(shape, layout)
        if not uneven and (lib.splits_in_blocks() or not blocks):
            return layout
        axes = [
            None
            if size % axis_size(self.device_mesh, axis) or dim in blocks
            else axis
            for dim, (size, axis) in enumerate(zip(shape, layout.axes))
        ]
        lacks = "parts of different sizes" if uneven else "dims of blocks"
        warnings.warn(
            f"Layout {layout.axes} does not fit variable {variable.path!r} of "
            f"shape {shape}, because this backend has no {lacks}. The layout "
            f"becomes {tuple(axes)}.",
            stacklevel=2,
        )
        return TensorLayout(axes, self.device_mesh)

    def get_tensor_layout(self, path):
        return self._layout_map.layout_for(path, current_root())

    def check_model(self, model):
        problems = self._layout_map.report(model).problems()
        if problems and self._layout_map.strict:
            raise ValueError(
                "A strict LayoutMap does not fit the model. "
                + " ".join(problems)
            )
        for problem in problems:
            warnings.warn(problem, stacklevel=2)
        named = {
            name
            for layout in self._layout_map.values()
            for axis in layout.axes
            for name in axis_names(axis)
        }
        sizes = axis_sizes(self.device_mesh)
        if named and all(sizes[name] == 1 for name in named):
            warn_if_unsplit(self.device_mesh, sorted(named))


def distribute_tensor(tensor, layout):
    """Changes the layout of a tensor, eagerly or in a compiled function.

    Example:

    ```python
    x = distribute_tensor(x, TensorLayout((None, "model"), mesh))
    ```

    Args:
        tensor: Tensor, or a structure of tensors that all get the layout.
        layout: `TensorLayout` with one entry for each dim, or a layout of the
            framework in use. A first dim that the batch axis does not divide,
            as in the last batch of an epoch, is replicated.

    Returns:
        The tensor with that layout. A `KerasTensor` is returned unchanged.

    Raises:
        ValueError: if the ranks differ or a mesh axis does not divide its dim.
    """
    return tree.map_structure(lambda t: _distribute_one(t, layout), tensor)


def _distribute_one(tensor, layout):
    if tensor is None or isinstance(tensor, KerasTensor):
        return tensor
    if getattr(layout, "gathered_from", None) is not None:
        tensor = _distribute_one(tensor, layout.gathered_from)
    if isinstance(layout, keras_lib.TensorLayout):
        shape = tuple(tensor.shape)
        batch_axis = getattr(distribution(), "batch_dim_name", None)
        layout = batch_replicated_if_uneven(layout, shape, batch_axis)
        path = current_path()
        check_layout(layout, shape, f"output of {path!r}" if path else "tensor")
    return backend.distribution_lib.distribute_tensor(tensor, layout)


def set_distribution(value):
    """Sets the global distribution, and installs the hooks if needed.

    Args:
        value: A `Distribution`, or `None` to go back to one device.

    Raises:
        ValueError: if the value is not a distribution, or a device of its mesh
            is not available.
    """
    if value is not None:
        arguments.check_distribution(value)
        install()
    keras_lib.set_distribution(value)


def install():
    """Installs the hooks that distribute models on Keras's current backend.

    `keras.distribution.set_distribution` then works too. The hooks have no
    effect on models without layouts. `set_distribution` and
    `Distribution.scope` call this function.

    Raises:
        ImportError: if this version of Keras is not supported.
    """
    if hooks.is_installed():
        hooks.install_imported()
        return
    lib = backend.distribution_lib
    lib.activate()
    # Last: a model enters its own distribution before a backend's hooks run.
    hooks.install(lib.hook_table() + TABLE + model_hooks.TABLE)


def uninstall():
    """Restores every attribute of Keras that `install` replaced."""
    hooks.uninstall()


@hooks.around
def _hook_set_global_attribute(original, name, value):
    """Checks a distribution: every way to set one calls this function."""
    if name == keras_lib.GLOBAL_ATTRIBUTE_NAME and value is not None:
        arguments.check_distribution(value)
    original(name, value)


TABLE = [
    hooks.Hook(
        "keras.src.backend.common.global_state",
        "set_global_attribute",
        _hook_set_global_attribute,
        "only a distribution can be set",
    ),
    hooks.Hook(
        "keras.src.distribution.distribution_lib",
        "distribute_tensor",
        lambda original: distribute_tensor,
        "the layout of a layer's output is checked, and fits any last batch",
    ),
]
