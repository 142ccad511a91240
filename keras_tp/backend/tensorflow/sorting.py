"""The smallest value of a dim, and what DTensor cannot sort."""

import tensorflow as tf


def argmin(original, input, axis=None, output_type=tf.int64, name=None):  # noqa: A002
    """The largest of the numbers in the opposite order."""
    x = tf.convert_to_tensor(input)
    if x.dtype.is_floating:
        opposite = -x
    elif x.dtype.is_unsigned:
        opposite = x.dtype.max - x
    else:
        # The smallest integer has no negative.
        opposite = -1 - x
    return tf.argmax(opposite, axis, output_type)


def _refused(why):
    """Returns a rule that raises; TensorFlow's error would end the process."""

    def rule(original, x, *args, **kwargs):
        raise NotImplementedError(
            f"DTensor cannot run Keras's `{original.__name__}`, {why}. Compute "
            "it of values that are not distributed, as "
            "`keras.ops.convert_to_numpy` gives them, or run the model with "
            "the JAX backend (KERAS_BACKEND=jax). Received: x with "
            f"shape={tuple(x.shape)}"
        )

    return rule


_LOOP = "which is a loop over rows"
_SORTED = "as the gradient of its sort writes outside of a part"

RULES = [
    ("tensorflow", "argmin", argmin, "DTensor has no ArgMin"),
    *(
        (f"keras.src.backend.tensorflow.{module}", name, _refused(why), why)
        for module, name, why in (
            ("numpy", "nanmedian", _LOOP),
            ("numpy", "nanquantile", _LOOP),
            ("nn", "sparsemax", _SORTED),
        )
    ),
]
