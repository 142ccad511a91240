"""Rematerialization that gathers no gradient.

TensorFlow's `tf.recompute_grad` makes the second forward pass wait for the
gradient by one number of it. DTensor gathers a split gradient for that.
"""

import functools

import tensorflow as tf
from tensorflow.python.eager import record

from keras_tp.backend import rematerialization
from keras_tp.backend.tensorflow import placement


def keeping(f, plain):
    """See `backend.rematerialization.row`."""

    @functools.wraps(plain)
    def remat(*args, **kwargs):
        tensors, whole = rematerialization.part(args, kwargs, _is_tensor)
        passes = []
        result, losses = _recomputed(f, whole, passes)(*tensors)
        (first,) = passes
        rematerialization.apply(f, first, first.values, losses)
        return result

    return remat


def _is_tensor(x):
    return isinstance(x, tf.Tensor)


def _recomputed(f, whole, passes):
    """Returns a function of tensors that its gradient computes again.

    It returns the result of `f` and a list of the losses that layers add, and
    appends the `Pass` in which it ran. `whole` makes the arguments of `f` from
    the tensors.
    """

    @placement.custom_gradient
    def forward(*tensors):
        with record.stop_recording(), rematerialization.Pass() as first:
            args, kwargs = whole(tensors)
            result = f(*args, **kwargs)
        passes.append(first)
        before = [(v, tf.convert_to_tensor(v.value)) for v in first.changed]

        def gradient(*upstream, variables=None):
            variables = list(variables or ())
            with tf.GradientTape() as tape:
                again = [_after(x, upstream, variables) for x in tensors]
                tape.watch([*again, *variables])
                with rematerialization.Pass(before) as second:
                    args, kwargs = whole(again)
                    result = f(*args, **kwargs)
            found = tape.gradient(
                tf.nest.flatten((result, second.losses)),
                [*again, *variables],
                output_gradients=list(upstream),
                unconnected_gradients=tf.UnconnectedGradients.ZERO,
            )
            count = len(tensors)
            of_tensors, of_variables = found[:count], found[count:]
            return (of_tensors, of_variables) if variables else of_tensors

        return (result, first.losses), gradient

    return forward


def _after(x, upstream, variables):
    """Returns `x`, which waits for a gradient.

    Without a new value, TensorFlow could take the results of the forward pass.
    A function without variables is elementwise most often, and the gradient is
    split like `x`. A layer may split it along other dims. Then `x` waits for
    one number of each example: DTensor adds them up, and gathers nothing.
    """
    if not x.dtype.is_floating:
        return tf.identity(x)
    alike = [dy for dy in upstream if dy.shape == x.shape]
    if alike and not variables:
        number = alike[0]
    else:
        number = _number_of_each_example(x, upstream)
    zero, nan = (tf.constant(value, x.dtype) for value in (0, float("nan")))
    return x + tf.where(number == number, zero, nan)


def _number_of_each_example(x, upstream):
    """Returns a tensor of shape `(batch, 1, ...)`, or of one number."""
    rank = len(x.shape)
    for dy in upstream:
        if rank and len(dy.shape) and dy.shape[0] == x.shape[0]:
            numbers = tf.reduce_max(dy, axis=list(range(1, len(dy.shape))))
            return tf.reshape(numbers, [-1] + [1] * (rank - 1))
    return tf.reduce_max(upstream[0])
