"""Moves values to the devices of a mesh and back to the host."""

import contextlib
import functools
import threading

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from keras_tp.backend.tensorflow import processes

_state = threading.local()


@contextlib.contextmanager
def on_mesh(mesh, batch_axis=None):
    """Runs operations on a mesh; plain tensors are replicated.

    Args:
        mesh: `dtensor.Mesh`.
        batch_axis: String, mesh axis that splits batches, or `None`.
    """
    before = getattr(_state, "current", None)
    _state.current = (mesh, batch_axis)
    try:
        with dtensor.default_mesh(mesh):
            yield
    finally:
        _state.current = before


def hook_default_mesh(original):
    """Leaves DTensor's default mesh even if the block raises an error."""

    @functools.wraps(original)
    @contextlib.contextmanager
    def _experimental_default_mesh(self, mesh):
        context = original(self, mesh)
        context.__enter__()
        try:
            yield
        finally:
            context.__exit__(None, None, None)

    return _experimental_default_mesh


@contextlib.contextmanager
def off_mesh():
    """Runs operations on the host, even within `on_mesh`."""
    before = getattr(_state, "current", None)
    _state.current = None
    try:
        with tf.init_scope(), tf.device("CPU:0"):
            yield
    finally:
        _state.current = before


def current_mesh():
    """Returns the mesh that `on_mesh` entered, or `None`."""
    current = getattr(_state, "current", None)
    return current and current[0]


def batch_axis():
    """Returns the mesh axis that splits batches, or `None`."""
    current = getattr(_state, "current", None)
    return current and current[1]


def custom_gradient(function):
    """Like `tf.custom_gradient`, but the gradient runs on the call's mesh.

    A custom loop computes gradients after it has left the mesh.

    Args:
        function: Callable that takes tensors and returns its result and a
            gradient function.
    """

    @functools.wraps(function)
    def with_gradient(*args, **kwargs):
        entered = getattr(_state, "current", None)
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
    if not isinstance(x, tf.Tensor) or not hasattr(x, "_handle_data"):
        return False
    if not hasattr(x, "numpy"):
        return False
    # The check has to run eagerly, even while a function is traced.
    with tf.init_scope():
        return dtensor.is_dtensor(x)


def specs_of(x):
    """Returns the mesh axes that split the dims of a tensor, if known.

    While tracing, DTensor does not know layouts yet. But a tensor read from a
    variable is split like the variable.

    Args:
        x: Tensor or variable. It may have added dims of size 1 in front.

    Returns:
        List of mesh axes and `dtensor.UNSHARDED`, for the last dims at least;
        `None` if the layout is not known.
    """
    x = getattr(x, "_value", x)
    if isinstance(x, dtensor.DVariable):
        return x.layout.sharding_specs
    if is_dtensor(x):
        with tf.init_scope():
            return dtensor.fetch_layout(x).sharding_specs
    if not isinstance(x, tf.Tensor) or tf.executing_eagerly():
        return None
    while x.op.type in ("Cast", "ExpandDims", "Identity"):
        x = x.op.inputs[0]
    if x.op.type != "ReadVariableOp":
        return None
    for outer, inner in x.graph.captures:
        if inner is x.op.inputs[0] and hasattr(outer, "numpy"):
            with tf.init_scope():
                if dtensor.is_dtensor(outer):
                    return dtensor.fetch_layout(outer).sharding_specs
    return None


def shard_slices(layout, shape, device_id):
    """Returns the part of a tensor that one device of a mesh holds.

    Args:
        layout: `dtensor.Layout`.
        shape: Tuple of ints, the shape of the whole tensor.
        device_id: Int, global id of a device of the mesh.

    Returns:
        Tuple of `(start, stop)`, one for each dim.
    """
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


def place(value, layout):
    """Puts a value on the devices of a mesh, or changes its layout.

    Args:
        value: Array, tensor or DTensor; a symbolic tensor while tracing.
        layout: `dtensor.Layout` that divides the value.

    Returns:
        A DTensor of that layout.
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
        if part == tuple((0, size) for size in shape):
            return value
        return value[tuple(slice(*ends) for ends in part)]

    return place_parts(part_of, shape, layout)


def replicated(value):
    """Returns a constant on all devices of the current mesh.

    Eagerly, DTensor accepts plain constants only if they are a few integers.

    Args:
        value: Array or tensor.
    """
    layout = dtensor.Layout.replicated(current_mesh(), len(value.shape))
    return place(value, layout)


def place_parts(part_of, shape, layout):
    """Puts a value on the devices of a mesh, part by part.

    Args:
        part_of: Callable that takes a tuple of `(start, stop)` for each dim
            and returns that part of the value as an array.
        shape: Tuple of ints, the shape of the whole value.
        layout: `dtensor.Layout` that divides the shape.
    """
    made = {}
    parts = []
    with tf.init_scope(), tf.device("CPU:0"):
        for device_id in layout.mesh.local_device_ids():
            part = shard_slices(layout, shape, device_id)
            if part not in made:
                made[part] = tf.constant(part_of(part))
            parts.append(made[part])
        return dtensor.pack(parts, layout)


def local_parts(tensor):
    """Returns the parts of a DTensor on this process's devices.

    Args:
        tensor: DTensor or `dtensor.DVariable`.

    Returns:
        List of `(device_id, slices, array)`; see `shard_slices`.
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
    """Assembles one part of a tensor from other parts of it.

    Args:
        parts: List of `(device_id, slices, array)`; see `local_parts`.
        wanted: Tuple of `(start, stop)` for each dim.
    """
    shape = tuple(stop - start for start, stop in wanted)
    result = np.empty(shape, parts[0][2].dtype)
    seen = set()
    for _, held, array in parts:
        if held in seen:
            continue
        seen.add(held)
        both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(held, wanted)]
        if any(start >= stop for start, stop in both):
            continue
        to = tuple(
            slice(start - offset, stop - offset)
            for (start, stop), (offset, _) in zip(both, wanted)
        )
        source = tuple(
            slice(start - offset, stop - offset)
            for (start, stop), (offset, _) in zip(both, held)
        )
        result[to] = array[source]
    return result


def wait(outputs):
    """Waits for the step that computes some outputs; raises its error.

    Reading a DTensor would also wait for the steps that were started later.
    Blocks other Python threads.

    Args:
        outputs: Structure of the step's outputs, which are ready together.
    """
    for value in tf.nest.flatten(outputs):
        if is_dtensor(value):
            with _raised_once(dtensor.fetch_layout(value).mesh):
                for part in dtensor.unpack(value):
                    part.numpy()
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


def to_host(value):
    """Returns a DTensor as a plain tensor, and anything else as it is."""
    if not is_dtensor(value):
        return value
    with tf.device("CPU:0"):
        return tf.constant(read(value))
