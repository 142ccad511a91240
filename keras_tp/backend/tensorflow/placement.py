"""Moves values to the devices of a mesh and back to the host."""

import contextlib
import functools
import threading
import weakref

import numpy as np
import tensorflow as tf
from keras.src import tree
from tensorflow.experimental import dtensor

from keras_tp.backend.hooks import around
from keras_tp.backend.tensorflow import own_memory
from keras_tp.backend.tensorflow import processes


class _State(threading.local):
    # The mesh and the batch axis that `on_mesh` entered, or `None`.
    current = None


_state = _State()


@contextlib.contextmanager
def on_mesh(mesh, batch_axis=None):
    """Runs operations on a mesh; plain tensors are replicated.

    `batch_axis` is the mesh axis that splits batches, or `None`.
    """
    with _entered((mesh, batch_axis)), dtensor.default_mesh(mesh):
        yield


@contextlib.contextmanager
def off_mesh():
    """Runs operations on the host, even within `on_mesh`."""
    with _entered(None), tf.init_scope(), tf.device("CPU:0"):
        yield


@contextlib.contextmanager
def _entered(current):
    before, _state.current = _state.current, current
    try:
        yield
    finally:
        _state.current = before


def current_mesh():
    """Returns the mesh that `on_mesh` entered, or `None`."""
    return _state.current and _state.current[0]


# Mesh of DTensor -> Keras's `DeviceMesh`.
_device_meshes = weakref.WeakValueDictionary()


def note_mesh(mesh, device_mesh):
    """Notes the `DeviceMesh` that a mesh of DTensor was made for."""
    _device_meshes[mesh] = device_mesh


def device_mesh(mesh):
    """Returns the `DeviceMesh` that a mesh of DTensor was made for."""
    return _device_meshes[mesh]


def batch_axis():
    """Returns the mesh axis that splits batches, or `None`."""
    return _state.current and _state.current[1]


def is_outermost():
    """Returns whether operations run eagerly, and not on a mesh."""
    return tf.executing_eagerly() and _state.current is None


@around
@contextlib.contextmanager
def hook_default_mesh(original, self, mesh):
    """Leaves DTensor's default mesh even if the block raises an error."""
    context = original(self, mesh)
    context.__enter__()
    try:
        yield
    finally:
        context.__exit__(None, None, None)


def custom_gradient(function):
    """Like `tf.custom_gradient`, but the gradient runs on the call's mesh.

    A custom loop computes gradients after it has left the mesh.
    """

    @functools.wraps(function)
    def with_gradient(*args, **kwargs):
        entered = _state.current
        result, gradient = function(*args, **kwargs)

        def gradient_on_mesh(*upstream, **kwargs):
            if entered is None or current_mesh() is not None:
                return gradient(*upstream, **kwargs)
            with on_mesh(*entered):
                return gradient(*upstream, **kwargs)

        return result, gradient_on_mesh

    return tf.custom_gradient(with_gradient)


def is_dtensor(x):
    """Returns whether `x` is an eager DTensor or a variable that holds one."""
    if isinstance(x, dtensor.DVariable):
        return True
    # A tensor of a graph has no value.
    if not isinstance(x, tf.Tensor) or not hasattr(x, "numpy"):
        return False
    # The check has to run eagerly, even while a function is traced.
    with tf.init_scope():
        return dtensor.is_dtensor(x)


def layout_of(x):
    """Returns the layout of an eager DTensor or variable, `None` for others."""
    if isinstance(x, dtensor.DVariable):
        return x.layout
    if not is_dtensor(x):
        return None
    with tf.init_scope():
        return dtensor.fetch_layout(x)


def specs_of(x):
    """Returns the mesh axes that split the dims of a tensor, `None` if unknown.

    While tracing, DTensor does not know layouts yet. But a tensor read from a
    variable is split like the variable. It may have added dims of size 1 in
    front: the axes are those of the last dims at least.
    """
    x = getattr(x, "_value", x)
    layout = layout_of(x)
    if layout is not None:
        return layout.sharding_specs
    if not hasattr(x, "op"):
        # No tensor, or one of an eager operation, which a trace may read.
        return None
    while x.op.type in ("Cast", "ExpandDims", "Identity"):
        x = x.op.inputs[0]
    if x.op.type != "ReadVariableOp":
        return None
    for outer, inner in x.graph.captures:
        layout = layout_of(outer) if inner is x.op.inputs[0] else None
        if layout is not None:
            return layout.sharding_specs
    return None


def shard_slices(layout, shape, device_id):
    """Returns the `(start, stop)` of each dim that one device holds."""
    mesh = layout.mesh
    position = int(np.argmax(np.ravel(mesh.global_device_ids()) == device_id))
    index = dict(
        zip(mesh.dim_names, np.unravel_index(position, tuple(mesh.shape())))
    )
    slices = []
    for size, axis in zip(shape, layout.sharding_specs):
        if axis == dtensor.UNSHARDED:
            slices.append((0, size))
            continue
        length = size // mesh.dim_size(axis)
        start = int(index[axis]) * length
        slices.append((start, start + length))
    return tuple(slices)


def place(value, layout, tensor_of=tf.constant):
    """Returns a value as a DTensor of a layout that divides it.

    The value is an array, a tensor or a DTensor; while tracing, it may be
    symbolic. For `tensor_of` see `place_parts`.
    """
    if is_dtensor(value):
        if dtensor.fetch_layout(value).mesh == layout.mesh:
            return dtensor.relayout(value, layout)
        value = read(value)
    elif not tf.executing_eagerly():
        return dtensor.relayout(tf.convert_to_tensor(value), layout)
    if not tf.is_tensor(value):
        value = np.asarray(value)
    shape = tuple(value.shape)

    def part_of(part):
        is_whole = part == tuple((0, size) for size in shape)
        return value if is_whole else value[tuple(slice(*p) for p in part)]

    return place_parts(part_of, shape, layout, tensor_of)


def replicated(value):
    """Returns a constant on all devices of the current mesh.

    Eagerly, DTensor accepts plain constants only if they are a few integers.
    """
    layout = dtensor.Layout.replicated(current_mesh(), len(value.shape))
    return place(value, layout)


def place_parts(part_of, shape, layout, tensor_of=tf.constant):
    """Puts a value on the devices of a mesh, part by part.

    `part_of` takes the `(start, stop)` of each dim, and returns that part of
    the value as an array or a tensor. `tensor_of` makes a tensor of it.
    """
    ids = layout.mesh.local_device_ids()
    parts = [shard_slices(layout, shape, device_id) for device_id in ids]
    with tf.init_scope(), tf.device("CPU:0"):
        made = {part: tensor_of(part_of(part)) for part in set(parts)}
        return dtensor.pack([made[part] for part in parts], layout)


def local_parts(tensor):
    """Returns a `(device_id, slices, array)` for each device of this process.

    `slices` are those of `shard_slices`.
    """
    if isinstance(tensor, dtensor.DVariable):
        tensor = tensor.read_value()
    layout = dtensor.fetch_layout(tensor)
    shape = tuple(tensor.shape)
    ids = layout.mesh.local_device_ids()
    with _raised_once(layout.mesh):
        return [
            (device_id, shard_slices(layout, shape, device_id), part.numpy())
            for device_id, part in zip(ids, dtensor.unpack(tensor))
        ]


def part_addresses(variable):
    """Returns where the parts of a variable lie, or `None` for small ones."""
    layout = variable.layout
    device_id = layout.mesh.local_device_ids()[0]
    limits = shard_slices(layout, tuple(variable.shape), device_id)
    shape = [stop - start for start, stop in limits]
    if not own_memory.is_large(shape, np.dtype(variable.dtype.as_numpy_dtype)):
        return None
    # The variable may be made while a function is traced.
    with tf.init_scope(), _raised_once(layout.mesh):
        return own_memory.addresses(dtensor.unpack(variable.read_value()))


def read(tensor):
    """Returns a whole DTensor or `dtensor.DVariable` as an array."""
    if isinstance(tensor, dtensor.DVariable):
        tensor = tensor.read_value()
    layout = dtensor.fetch_layout(tensor)
    mesh = layout.mesh
    if (
        mesh.num_local_devices() < mesh.size
        and not layout.is_fully_replicated()
    ):
        # Other processes hold parts of it: this is a collective.
        processes.meet("Converting a tensor to numpy, as saving does,")
        replicated = dtensor.Layout.replicated(mesh, len(tensor.shape))
        tensor = dtensor.relayout(tensor, replicated)
        layout = replicated
    if layout.is_fully_replicated():
        # Unlike `unpack`, this does not block other threads.
        return np.array(tensor.numpy())
    whole = tuple((0, size) for size in tensor.shape)
    return part_from(local_parts(tensor), whole)


def part_from(parts, wanted):
    """Assembles the part `wanted` of a tensor from `local_parts` of it."""
    shape = tuple(stop - start for start, stop in wanted)
    result = np.empty(shape, parts[0][2].dtype)

    def within(shared, outer):
        return tuple(
            slice(start - offset, stop - offset)
            for (start, stop), (offset, _) in zip(shared, outer)
        )

    for held, array in {held: array for _, held, array in parts}.items():
        shared = [
            (max(a, c), min(b, d)) for (a, b), (c, d) in zip(held, wanted)
        ]
        if all(start < stop for start, stop in shared):
            result[within(shared, wanted)] = array[within(shared, held)]
    return result


def wait(outputs, then=None):
    """Waits for the step that computes some outputs; raises its error.

    The outputs are ready together. Reading a DTensor would also wait for the
    steps that were started later. Blocks other Python threads.

    Args:
        outputs: Structure with the outputs of a step.
        then: The outputs of a step that was started after it. If the first one
            fails, this one ends too, and its error is dropped: DTensor would
            raise it in the next operation.
    """
    for value in tf.nest.flatten(outputs):
        if is_dtensor(value):
            try:
                with _raised_once(dtensor.fetch_layout(value).mesh):
                    for part in dtensor.unpack(value):
                        part.numpy()
            except tf.errors.OpError:
                with contextlib.suppress(tf.errors.OpError):
                    wait(then)
                raise
            return


@contextlib.contextmanager
def _raised_once(mesh):
    """Clears an error that the block raises from DTensor's devices.

    Reading a part of a failed step's output raises the error of the step.
    DTensor does not notice: it keeps the error and raises it again in the next
    operation, even of another model.
    """
    try:
        yield
    except tf.errors.OpError as error:
        kept = _forget_error(mesh)
        if isinstance(error, tf.errors.CancelledError) and kept is not None:
            # This device was stopped because another one failed.
            raise kept from error
        raise


def _forget_error(mesh):
    """Clears the error that DTensor keeps, and returns it or `None`.

    To copy a replicated tensor to the host, DTensor waits for all devices and
    resets each of them. This removes the error and the order to cancel all
    operations. `context.async_wait` would leave the order in place.
    """
    if mesh.num_local_devices() < mesh.size:
        # The devices may wait for another process. The error ends the run
        # anyway.
        return None
    layout = dtensor.Layout.replicated(mesh, 0)
    with tf.init_scope(), tf.device("CPU:0"):
        value = dtensor.pack(
            [tf.constant(0)] * mesh.num_local_devices(), layout
        )
    try:
        value.numpy()
    except tf.errors.OpError as kept:
        return kept
    return None


def to_host(values):
    """Returns a structure with plain tensors in place of DTensors."""

    def plain(value):
        if not is_dtensor(value):
            return value
        with tf.device("CPU:0"):
            return tf.constant(read(value))

    return tree.map_structure(plain, values)
