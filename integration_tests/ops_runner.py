"""Runs a computation on tensors that are split, as a user's program does.

Each backend has its own route: a compiled function on JAX, a `tf.function` on
TensorFlow, and the operations themselves on torch. All of them give results
and gradients as arrays.
"""

import collections

import keras
import numpy as np

from integration_tests import ops_cases
from keras_tp import distribution

BACKEND = keras.config.backend()
SEED = 11


class Found(
    collections.namedtuple("Found", ["outputs", "gradients", "is_whole"])
):
    """What a computation gave.

    Args:
        outputs: List of arrays.
        gradients: List with an array, or `None`, for each input.
        is_whole: List of booleans: whether every device holds all of an
            output.
    """

    def lies_whole(self, inputs):
        """Returns whether a device holds more than its part of the inputs.

        A reduction may give each device a small result whole.
        """
        part = max(x.size for x in inputs) // 2
        return any(
            whole and x.size > part
            for whole, x in zip(self.is_whole, self.outputs)
        )


class Reference(
    collections.namedtuple("Reference", ["case", "found", "gradients"])
):
    """What one device gives.

    Args:
        case: `ops_cases.Case` as it can be run.
        found: `Found`.
        gradients: Boolean, whether gradients can be taken.
    """


def _refusals():
    """Returns the errors that Keras and the frameworks raise."""
    found = [
        AssertionError,
        AttributeError,
        IndexError,
        NotImplementedError,
        RuntimeError,
        TypeError,
        ValueError,
    ]
    if BACKEND == "tensorflow":
        import tensorflow as tf

        # An operation that has no gradient is not found in a table.
        found += [tf.errors.OpError, LookupError]
    return tuple(found)


_REFUSALS = _refusals()


def _is_float(x):
    return keras.backend.is_float_dtype(
        keras.backend.standardize_dtype(x.dtype)
    )


def _outputs(structure):
    """Returns the tensors of a result; complex ones as two."""
    found = []
    for x in keras.tree.flatten(structure):
        if "complex" in str(getattr(x, "dtype", "")):
            found += [keras.ops.real(x), keras.ops.imag(x)]
        elif x is not None:
            found.append(x)
    return found


def _loss(outputs):
    """Returns a random-weighted sum; `None` if no output has a gradient."""
    weights = ops_cases.weights_like(outputs)
    total = None
    for x, weight in zip(outputs, weights):
        if not hasattr(x, "dtype") or not _is_float(x):
            continue
        weight = keras.ops.convert_to_tensor(weight, x.dtype)
        # The gradient gets the layout of the output. A replicated one would
        # not run the operations that split it.
        weight = weight * keras.ops.ones_like(x)
        part = keras.ops.sum(x * weight)
        total = part if total is None else total + part
    return total


def _arrays(tensors):
    return [
        None if x is None else np.asarray(keras.ops.convert_to_numpy(x))
        for x in tensors
    ]


def _run_jax(function, tensors, jit, gradients):
    import jax

    floats = [i for i, x in enumerate(tensors) if _is_float(x)]

    def forward(*given):
        outputs = _outputs(function(*given))
        loss = _loss(outputs) if gradients else None
        return (0.0 if loss is None else loss), outputs

    if gradients and floats and jit:
        step = jax.value_and_grad(forward, floats, has_aux=True)
        (_, outputs), found = jax.jit(step)(*tensors)
    else:
        (_, outputs), found = (
            (jax.jit(forward) if jit else forward)(*tensors),
            (),
        )
    by_input = dict(zip(floats, found))
    whole = [
        not isinstance(x, jax.Array) or x.sharding.is_fully_replicated
        for x in outputs
    ]
    grads = [by_input.get(i) for i in range(len(tensors))]
    return Found(_arrays(outputs), _arrays(grads), whole)


def _run_tensorflow(function, tensors, jit, gradients):
    import tensorflow as tf
    from tensorflow.experimental import dtensor

    from keras_tp.backend.tensorflow import boundary
    from keras_tp.backend.tensorflow import errors
    from keras_tp.backend.tensorflow import placement

    layouts = []

    def call(*given):
        if jit or not any(map(placement.is_dtensor, given)):
            return _outputs(function(*given))
        # As a layer does that is called eagerly.
        mesh = dtensor.fetch_layout(given[0]).mesh
        with placement.on_mesh(mesh), errors.explained():
            outputs = _outputs(function(*given))
        return [leave_mesh(x) for x in outputs]

    def step(*given):
        with tf.GradientTape() as tape:
            tape.watch([x for x in given if _is_float(x)])
            outputs = call(*given)
            loss = _loss(outputs) if gradients else None
        found = [None] * len(given)
        if loss is not None:
            found = tape.gradient(loss, list(given))
        found = [None if g is None else tf.convert_to_tensor(g) for g in found]
        return outputs, found

    # What leaves the mesh is a plain tensor: its layout is read before.
    leave = boundary.leave_mesh

    def leave_mesh(value):
        is_placed = isinstance(value, tf.Tensor) and placement.is_dtensor(value)
        layouts.append(dtensor.fetch_layout(value) if is_placed else None)
        return leave(value)

    boundary.leave_mesh = leave_mesh
    try:
        if jit:
            outputs, found = tf.function(step, autograph=False)(*tensors)
        else:
            outputs, found = step(*tensors)
    finally:
        boundary.leave_mesh = leave
    whole = [
        layout is None or layout.is_fully_replicated()
        for layout in layouts[: len(outputs)]
    ]
    return Found(_arrays(outputs), _arrays(found), whole)


def _run_torch(function, tensors, jit, gradients):
    import torch
    from torch.distributed.tensor import DTensor

    for x in tensors:
        if gradients and x.is_floating_point():
            x.requires_grad_(True)
    outputs = _outputs(function(*tensors))
    found = [None] * len(tensors)
    loss = _loss(outputs) if gradients else None
    if torch.is_tensor(loss) and loss.requires_grad:
        loss.backward()
        found = [x.grad for x in tensors]
    whole = [
        not isinstance(x, DTensor)
        or all(p.is_replicate() for p in x.placements)
        for x in outputs
    ]
    return Found(_arrays(outputs), _arrays(found), whole)


run = {
    "jax": _run_jax,
    "tensorflow": _run_tensorflow,
    "torch": _run_torch,
}[BACKEND]


def reference(case):
    """Runs a case without a distribution, as it can be run there.

    Args:
        case: `ops_cases.Case`.

    Returns:
        `Reference`, or `None` if Keras refuses the case on this backend.
    """
    errors = []
    for gradients in (True, False):
        for jit in (True, False) if case.jit else (False,):
            tensors = [keras.ops.convert_to_tensor(x) for x in case.inputs]
            tried = case._replace(jit=jit)
            keras.utils.set_random_seed(SEED)
            try:
                found = run(tried.function, tensors, jit, gradients)
            except _REFUSALS as e:
                errors.append(e)
                continue
            return Reference(tried, found, gradients)
    return None


def outcome(known, axes, mesh):
    """Runs a case with split inputs, and says how it ends.

    Args:
        known: `Reference`.
        axes: List with a tuple for each input: the mesh axis, or `None`, of
            each of its dims.
        mesh: `DeviceMesh`.

    Returns:
        Pair of strings: `"split"`, `"whole"`, `"refused"` or `"wrong"`, and
        what is wrong or why it is refused.
    """
    try:
        found = on_mesh(known.case, axes, mesh, known.gradients)
    except _REFUSALS as e:
        text = f"{type(e).__name__}: {e}"
        is_clear = isinstance(e, (NotImplementedError, ValueError))
        if is_clear and "Received: " in text:
            return "refused", text
        return "wrong", f"an error that is not clear: {text[:600]}"
    difference = differences(found, known.found)
    if difference:
        return "wrong", difference
    is_alone = sum(axis is not None for of in axes for axis in of) == 1
    if is_alone and found.lies_whole(known.case.inputs):
        return "whole", ""
    return "split", ""


def on_mesh(case, axes, mesh, gradients=True):
    """Runs a case with inputs split along dims of their own.

    Args:
        case: `ops_cases.Case`.
        axes: List with a tuple for each input: the mesh axis, or `None`, of
            each of its dims.
        mesh: `DeviceMesh`.
        gradients: Boolean, whether gradients are taken. Defaults to `True`.
    """
    tensors = []
    for x, of_dims in zip(case.inputs, axes):
        layout = distribution.TensorLayout(of_dims, mesh)
        tensor = keras.ops.convert_to_tensor(x)
        tensors.append(distribution.distribute_tensor(tensor, layout))
        if BACKEND == "torch":
            tensors[-1] = tensors[-1].detach()
    keras.utils.set_random_seed(SEED)
    return run(case.function, tensors, case.jit, gradients)


def differences(found, expected):
    """Returns what differs by more than rounding, as a text, or `""`."""
    for kind in ("outputs", "gradients"):
        got, wanted = getattr(found, kind), getattr(expected, kind)
        if len(got) != len(wanted):
            return f"{len(got)} {kind} in place of {len(wanted)}"
        for i, (a, b) in enumerate(zip(got, wanted)):
            if (a is None) != (b is None):
                if not np.any(b if a is None else a):
                    # No gradient is one of zeros.
                    continue
                return f"{kind} {i}: {a} in place of {b}"
            if a is None:
                continue
            if a.shape != b.shape or a.dtype != b.dtype:
                return (
                    f"{kind} {i}: {a.dtype}{a.shape} in place of "
                    f"{b.dtype}{b.shape}"
                )
            if a.dtype.kind in "fc":
                scale = np.max(np.abs(b[np.isfinite(b)]), initial=1)
                if not np.allclose(
                    a, b, rtol=1e-4, atol=2e-5 * scale, equal_nan=True
                ):
                    return (
                        f"{kind} {i} differ by {np.max(np.abs(a - b))}: {a} "
                        f"in place of {b}"
                    )
            elif not np.array_equal(a, b):
                return f"{kind} {i}: {a} in place of {b}"
    return ""
