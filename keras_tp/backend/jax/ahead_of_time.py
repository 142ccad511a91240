"""Compiles a train step for an accelerator that is not there.

XLA's compilers for GPUs and TPUs are in packages. They compile for a topology,
a description of devices, and no device is needed.
"""

import contextlib
import importlib
import math
import os
import re

import jax
import numpy as np
from jax._src import hardware_utils
from jax._src import xla_bridge
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.experimental import topologies
from keras.src import tree

from keras_tp.backend.jax import batches
from keras_tp.backend.jax import schedule
from keras_tp.backend.jax import storage

# XLA's description of the device, as in its `specs/h100_sxm.txtpb`. The
# versions are those of the CUDA libraries that jax's packages depend on.
_H100 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84942979072
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 patch: 0 }
runtime_version { major: 12 minor: 9 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
_GPUS = {"h100": _H100}
_GPUS_OF_A_NODE = 8
_CUDNN_VERSION = 90800
_COMPUTE_CAPABILITY = (9, 0)
# Dims of the grid of a TPU's slices.
_TPUS = {"v5e": 2, "v5p": 3, "v6e": 2}
# What libtpu reads where it is loaded, on a machine without a TPU.
_NO_HOST = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    # One process at a time may use a TPU, but many may compile.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
_INSTALL = "pip install 'keras_tp[jax,ahead]'"
_DOES_NOT_FIT = re.compile(r"Used ([\d.]+)([KMG]) of ([\d.]+)([KMG]) hbm")
_NO_TILES = "Couldn't find output tile sizes"
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


def mesh(target, shape, axis_names):
    """Returns a mesh of devices that can only be compiled for.

    Args:
        target: String, one of `"h100"`, `"v5e"`, `"v5p"` and `"v6e"`.
        shape: Tuple of ints.
        axis_names: Sequence of strings.

    Returns:
        A `jax.sharding.Mesh`.

    Raises:
        ImportError: if the package with the compiler is not installed.
        ValueError: if there is no slice of TPUs with so many chips.
    """
    count = math.prod(shape)
    devices = _gpus(target, count) if target in _GPUS else _tpus(target, count)
    return jax.sharding.Mesh(np.reshape(devices, shape), tuple(axis_names))


def _gpus(target, count):
    nodes = max(count // _GPUS_OF_A_NODE, 1)
    if count > _GPUS_OF_A_NODE and count % _GPUS_OF_A_NODE:
        raise ValueError(
            f"GPUs come in nodes of {_GPUS_OF_A_NODE}. `count` must be at most "
            f"{_GPUS_OF_A_NODE}, or a multiple of it. Received: count={count}"
        )
    shape = f"1x{nodes}x{count // nodes}"
    try:
        topology = _gpu_topology(target, shape)
    except NotImplementedError:
        _register_compiler(target)
        topology = _gpu_topology(target, shape)
    return list(topology.devices)


def _gpu_topology(target, shape):
    return topologies.get_topology_desc(
        platform="cuda", target_config=_GPUS[target], topology=shape
    )


def _register_compiler(target):
    """Registers the plugin that JAX left out as it found no CUDA libraries."""
    try:
        plugin = importlib.import_module("jax_plugins.xla_cuda12")
    except ImportError as e:
        raise _missing("jax-cuda12-plugin", target) from e
    # JAX's own devices first: it must not try to start this one.
    xla_bridge.backends()
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    plugin.initialize()
    # JAX calls these for the plugins that it finds itself.
    for callback in xla_bridge._plugin_callbacks:
        callback(c_api=xla_bridge._backend_factories["cuda"].c_api)


def _tpus(target, count):
    if xla_bridge.get_tpu_library_path() is None:
        raise _missing("libtpu", target)
    grid = "x".join(map(str, _grid(count, _TPUS[target])))
    try:
        with _known_host():
            topology = topologies.get_topology_desc(
                platform="tpu", topology_name=f"{target}:{grid}"
            )
    except jax.errors.JaxRuntimeError as e:
        if "INVALID_ARGUMENT" not in str(e):
            raise
        raise ValueError(
            f"There is no {grid} slice of TPU {target}. Received: "
            f"target={target!r}, count={count}"
        ) from e
    return list(topology.devices)


@contextlib.contextmanager
def _known_host():
    """Context in which libtpu is told what it would ask a TPU's host for.

    Without a TPU it asks a server that only machines of Google's cloud have,
    and prints errors. The topology to compile for does not depend on it.
    """
    chips, _ = hardware_utils.num_available_tpu_chips_and_device_id()
    added = set() if chips else set(_NO_HOST) - set(os.environ)
    os.environ.update({name: _NO_HOST[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _grid(count, dims):
    """Returns the sides of the most compact grid of so many chips.

    Sides are powers of two, as those of slices up to a cube or a pod are.
    """
    if count & (count - 1):
        raise ValueError(
            "The number of chips in a TPU slice must be a power of two. "
            f"Received: count={count}"
        )
    power, sides = count.bit_length() - 1, []
    for left in range(dims, 0, -1):
        sides.append(power // left)
        power -= sides[-1]
    return [2**side for side in sides]


def _missing(package, target):
    return ImportError(
        f"To compile for {target!r}, JAX needs the package {package!r}: "
        f"`{_INSTALL}`. Received: target={target!r}"
    )


def compile_step(model, layouts, x, y, distribution):
    """Compiles the train step of a model that has no weights.

    Args:
        model: A compiled Keras model. Its variables need no values.
        layouts: Function of a variable that returns its `TensorLayout`.
        x: Structure of `KerasTensor`s, the inputs of a batch.
        y: Structure of `KerasTensor`s, the targets.
        distribution: `Distribution` on a mesh from `mesh`; the current one.

    Returns:
        Dict of `"steps"`, a list of `Step`, and `"memory"`, a dict of
        `"arguments"`, `"outputs"`, `"aliased"`, `"temporaries"` and `"peak"` to
        bytes on one device, and `"memory_limit"`, the bytes that the compiler
        has, or `None`. If it finds that the program does not fit, there are no
        steps, and only the peak is known.
    """

    def abstract(variable):
        layout = variable._layout = layouts(variable)
        return jax.ShapeDtypeStruct(
            storage.shape_in(variable, layout),
            variable._dtype,
            sharding=layout.backend_layout,
        )

    def placed(tensor):
        layout = batches.fitting_sharding(
            tensor.shape, distribution.get_data_layout(tensor.shape)
        )
        return jax.ShapeDtypeStruct(tensor.shape, tensor.dtype, sharding=layout)

    batch = tree.map_structure(placed, (x, y))
    for variable in model.variables:
        variable._layout = layouts(variable)
    model._symbolic_build(data_batch=batch)
    state = tuple(
        [abstract(variable) for variable in variables]
        for variables in (
            model.trainable_variables,
            model.non_trainable_variables,
            model.optimizer.variables,
            model.metrics_variables,
        )
    )
    step = jax.jit(
        model.train_step,
        donate_argnums=0,
        out_shardings=(None, tree.map_structure(lambda v: v.sharding, state)),
    )
    devices = distribution.device_mesh.backend_mesh.devices
    with _as_if_on(list(devices.flat)):
        lowered = step.lower(state, batch)
    try:
        compiled = _compiled(lowered)
    except jax.errors.JaxRuntimeError as e:
        found = _DOES_NOT_FIT.search(str(e))
        if found is None:
            raise
        needed, limit = (
            int(float(size) * _UNITS[unit])
            for size, unit in (found.groups()[:2], found.groups()[2:])
        )
        memory = {"peak": needed}
        return {"steps": [], "memory": memory, "memory_limit": limit}
    memory = compiled.memory_analysis()
    return {
        "steps": schedule.steps(compiled.as_text()),
        "memory": {
            "arguments": memory.argument_size_in_bytes,
            "outputs": memory.output_size_in_bytes,
            "aliased": memory.alias_size_in_bytes,
            "temporaries": memory.temp_size_in_bytes,
            "peak": _peak(memory),
        },
        "memory_limit": None,
    }


def _compiled(lowered):
    """Compiles; matmuls of sizes that XLA has no tiles for go to cuBLAS.

    On a GPU, XLA tries several kernels for a matmul and takes the fastest one
    that works. Without a GPU, it takes its own and fails at some sizes.
    """
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as e:
        if _NO_TILES not in str(e):
            raise
    return lowered.compile({"xla_gpu_enable_triton_gemm": False})


def _peak(memory):
    """Returns the most bytes that a program holds on one device.

    Outputs that take the place of donated arguments count once.
    """
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )


@contextlib.contextmanager
def _as_if_on(devices):
    """Context in which JAX finds these devices.

    Keras, KerasHub and JAX choose the kernel of attention by them.
    """
    replaced = {(jax, "devices"): lambda *args, **kwargs: list(devices)}
    if devices[0].platform == "gpu":
        replaced[cudnn, "check_cudnn_version"] = lambda: _CUDNN_VERSION
        replaced[cudnn, "check_compute_capability"] = lambda least: (
            _COMPUTE_CAPABILITY >= _version(least)
        )
        replaced[cudnn, "is_cuda_compute_capability_equal"] = lambda other: (
            _COMPUTE_CAPABILITY == _version(other)
        )
    originals = {key: getattr(*key) for key in replaced}
    try:
        for (owner, name), value in replaced.items():
            setattr(owner, name, value)
        yield
    finally:
        for (owner, name), value in originals.items():
            setattr(owner, name, value)


def _version(text):
    return tuple(int(part) for part in text.split("."))
