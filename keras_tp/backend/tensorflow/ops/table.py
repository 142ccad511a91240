"""Rules for operations that DTensor cannot split, or splits incorrectly.

On a mesh, a rule replaces a function of Keras's backend, or a public function
of TensorFlow, so that KerasHub and a user's own code use it too. All rules are
one row of the hook table. `ops/expansions_test.py` lists the operations that
stay whole or are refused.
"""

import functools

import numpy as np
import tensorflow as tf
from keras import tree
from tensorflow.experimental import dtensor

from keras_tp.backend.hooks import Hook
from keras_tp.backend.tensorflow import placement
from keras_tp.backend.tensorflow.ops import conv
from keras_tp.backend.tensorflow.ops import counting
from keras_tp.backend.tensorflow.ops import ctc
from keras_tp.backend.tensorflow.ops import embedding
from keras_tp.backend.tensorflow.ops import images
from keras_tp.backend.tensorflow.ops import matmul
from keras_tp.backend.tensorflow.ops import random
from keras_tp.backend.tensorflow.ops import shape_ops
from keras_tp.backend.tensorflow.ops import sorting

# What has no gradient: an array, or a number of a list.
_NUMBERS = (bool, float, int, np.generic, np.ndarray)


def band_part(original, input, num_lower, num_upper, name=None):
    """Selects the band by a comparison of row and column indices."""
    input = tf.convert_to_tensor(input)
    below = _rows_minus_columns(*input.shape[-2:])
    lower, upper = tf.cast(num_lower, tf.int32), tf.cast(num_upper, tf.int32)
    kept = tf.logical_and(
        tf.logical_or(lower < 0, below <= lower),
        tf.logical_or(upper < 0, -below <= upper),
    )
    return tf.where(kept, input, tf.zeros([], input.dtype))


def diag_part(original, input, *args, **kwargs):
    """Sets all but the diagonal to zero and sums each row."""
    _check_main_diagonal("diag_part", args, kwargs)
    input = tf.convert_to_tensor(input)
    size = min(input.shape[-2:])
    return tf.reduce_sum(_only_diagonal(input[..., :size, :size]), -1)


def diag(original, diagonal, *args, **kwargs):
    """Broadcasts the values over columns and keeps the diagonal."""
    _check_main_diagonal("diag", args, kwargs)
    return _only_diagonal(tf.convert_to_tensor(diagonal)[..., None])


def _check_main_diagonal(name, args, kwargs):
    if args or {k: v for k, v in kwargs.items() if k != "name" and v != 0}:
        raise ValueError(
            f"Under a distribution, `tf.linalg.{name}` supports the main "
            f"diagonal only. Received: {args} {kwargs}"
        )


def eye(
    original,
    num_rows,
    num_columns=None,
    batch_shape=None,
    dtype=tf.float32,
    name=None,
):
    """Compares row and column indices."""
    if batch_shape is not None:
        return original(num_rows, num_columns, batch_shape, dtype, name)
    num_columns = num_rows if num_columns is None else num_columns
    return tf.cast(_rows_minus_columns(num_rows, num_columns) == 0, dtype)


def _only_diagonal(matrix):
    """Sets the rest to zero; broadcasts a single column."""
    size = matrix.shape[-2]
    kept = _rows_minus_columns(size, size) == 0
    return tf.where(kept, matrix, tf.zeros([], matrix.dtype))


def _rows_minus_columns(rows, columns):
    return tf.range(rows)[:, None] - tf.range(columns)[None, :]


def one_hot(
    original,
    indices,
    depth,
    on_value=None,
    off_value=None,
    axis=None,
    dtype=None,
    name=None,
):
    """Compares the indices, which may be split, with all class numbers."""
    indices = tf.convert_to_tensor(indices)
    on = tf.convert_to_tensor(1 if on_value is None else on_value)
    off = tf.convert_to_tensor(0 if off_value is None else off_value)
    if dtype is None:
        dtype = tf.float32 if on_value is None else on.dtype
    axis = len(indices.shape) if axis in (None, -1) else axis
    shape = [1] * (len(indices.shape) + 1)
    shape[axis] = -1
    numbers = tf.reshape(tf.range(tf.cast(depth, indices.dtype)), shape)
    return tf.where(
        tf.expand_dims(indices, axis) == numbers,
        tf.cast(on, dtype),
        tf.cast(off, dtype),
    )


def convert_to_tensor(original, value, *args, **kwargs):
    """Places numbers on the mesh, where eager operations need them.

    DTensor places a plain tensor itself in a traced function only, or if it is
    small and not of floats.
    """
    found = original(value, *args, **kwargs)
    if (
        not tf.executing_eagerly()
        or not found.shape.rank
        or not found.dtype.is_floating
        or not all(isinstance(x, _NUMBERS) for x in tree.flatten(value))
    ):
        return found
    return placement.replicated(found.numpy())


def softsign(original, features, name=None):
    """Computes the formula: DTensor has no expansion of its gradient."""
    x = tf.convert_to_tensor(features)
    return x / (1 + tf.abs(x))


def ensure_shape(original, x, shape, name=None):
    """Compares the shape at once: DTensor has no expansion."""
    x = tf.convert_to_tensor(x)
    if not x.shape.is_fully_defined():
        return original(x, shape, name)
    if not x.shape.is_compatible_with(shape):
        raise ValueError(
            f"A tensor should have the shape {shape}. Received: {x.shape}"
        )
    return x


def where(original, condition, x=None, y=None, name=None):
    """Gives a condition of no dims as many dims as the values have.

    DTensor ends the process if one condition chooses between split tensors.
    """
    if x is None or y is None or len(np.shape(condition)):
        return original(condition, x, y, name)
    rank = max(len(np.shape(value)) for value in (x, y))
    condition = tf.convert_to_tensor(condition)
    return original(tf.reshape(condition, [1] * rank), x, y, name)


def concat(original, values, axis, name="concat"):
    """Joins batches; DTensor fails if what follows needs the result split."""
    joined = original(values, axis, name)
    axis = tf.get_static_value(tf.convert_to_tensor(axis))
    if placement.batch_axis() is None or axis is None or int(axis):
        return joined
    values = values if isinstance(values, (list, tuple)) else [values]
    sizes = {len(x.shape) and x.shape[0] for x in values if hasattr(x, "shape")}
    if joined.shape[0] is None or sizes <= {0, 1}:
        return joined
    return sorting.gathered(joined, 0)


def scatter_nd(original, indices, updates, shape, name=None):
    """Casts indices to int32, because DTensor always makes int32 shapes."""
    indices = tf.cast(indices, tf.int32)
    return original(indices, updates, tf.cast(shape, tf.int32), name)


def rnn(original, *args, **kwargs):
    """Unrolls the loop: DTensor has no expansion of its tensor lists."""
    names = ("step_function", "inputs", "initial_states", "go_backwards")
    names += ("mask", "constants", "unroll", "input_length", "time_major")
    kwargs.update(zip(names, args))
    kwargs["unroll"] = True
    if kwargs.get("time_major"):
        return original(**kwargs)
    kwargs["time_major"] = True
    kwargs["inputs"] = tree.map_structure(
        shape_ops.steps_first, kwargs["inputs"]
    )
    if kwargs.get("mask") is not None:
        kwargs["mask"] = shape_ops.steps_first(kwargs["mask"])
        if kwargs.get("go_backwards"):
            # Keras's unrolled loop reverses the mask of the steps. It does not
            # reverse the mask that sets outputs to zero.
            kwargs["go_backwards"] = False
            for name in ("inputs", "mask"):
                kwargs[name] = tree.map_structure(
                    lambda x: tf.stack(tf.unstack(x)[::-1]), kwargs[name]
                )
    last, outputs, states = original(**kwargs)
    return last, tree.map_structure(shape_ops.samples_first, outputs), states


def time_distributed(original, self, inputs, training=None, mask=None):
    """Takes the steps from the second dim, and stacks them along it.

    Keras swaps the first two dims before and after. DTensor cannot split a dim
    in a transpose, nor gather it, as the gradients of a layer may need.
    """
    steps = inputs.shape[1]
    is_fitting = mask is None or mask.shape[:2] == inputs.shape[:2]
    if steps is None or not is_fitting:
        return original(self, inputs, training=training, mask=mask)
    outputs = []
    for i in range(steps):
        kwargs = {}
        if self.layer._call_has_mask_arg and mask is not None:
            kwargs["mask"] = mask[:, i]
        if self.layer._call_has_training_arg:
            kwargs["training"] = training
        outputs.append(self.layer.call(inputs[:, i], **kwargs))
    return tf.stack(outputs, 1)


def decline(original, *args, **kwargs):
    """Declines the fused kernel: the layer then computes step by step."""
    raise NotImplementedError


# Owner, as in a hook's row -> name of its function -> rule.
_RULES_BY_OWNER = {
    "keras.src.backend": {"gru": decline, "lstm": decline, "rnn": rnn},
    "keras.src.backend.tensorflow.core": {
        "slice_update": shape_ops.slice_update,
    },
    "keras.src.backend.tensorflow.nn": {
        "ctc_loss": ctc.ctc_loss,
        "sparsemax": sorting.sparsemax,
    },
    "keras.src.backend.tensorflow.numpy": {
        "digitize": counting.digitize,
        "histogram": counting.histogram,
        "nanquantile": sorting.nanquantile,
        "repeat": matmul.repeat,
        "split": shape_ops.keras_split,
        "take_along_axis": embedding.take_along_axis,
    },
    "keras.src.layers.rnn.time_distributed:TimeDistributed": {
        "call": time_distributed,
    },
    "tensorflow": {
        "argmax": sorting.argmax,
        "argmin": sorting.argmin,
        "concat": concat,
        "convert_to_tensor": convert_to_tensor,
        "einsum": matmul.einsum,
        "ensure_shape": ensure_shape,
        "eye": eye,
        "gather": embedding.gather,
        "matmul": matmul.matmul,
        "one_hot": one_hot,
        "pad": shape_ops.pad,
        "reduce_mean": shape_ops.reduce_mean,
        "reverse": shape_ops.reverse,
        "roll": shape_ops.roll,
        "scatter_nd": scatter_nd,
        "searchsorted": counting.searchsorted,
        "split": shape_ops.split,
        "squeeze": shape_ops.squeeze,
        "stack": shape_ops.stack,
        "tensordot": matmul.tensordot,
        "transpose": shape_ops.transpose,
        "unstack": shape_ops.unstack,
        "where": where,
    },
    "tensorflow.python.ops.nn_ops": {"top_k": sorting.top_k_of_sort},
    "tensorflow:Tensor": {"__getitem__": shape_ops.getitem},
    "tensorflow:Variable": {"__getitem__": shape_ops.getitem},
    "tensorflow:image": {
        "hsv_to_rgb": images.hsv_to_rgb,
        "resize": images.resize,
        "rgb_to_hsv": images.rgb_to_hsv,
    },
    "tensorflow:linalg": {
        "band_part": band_part,
        "diag": diag,
        "diag_part": diag_part,
    },
    "tensorflow:math": {
        "bincount": counting.bincount,
        "in_top_k": sorting.in_top_k,
        "top_k": sorting.top_k,
    },
    "tensorflow:nn": {
        "avg_pool": conv.avg_pool,
        "bias_add": conv.bias_add,
        "conv1d": conv.conv1d,
        "conv2d": conv.convolution,
        "conv_transpose": conv.conv_transpose,
        "convolution": conv.convolution,
        "depthwise_conv2d": conv.depthwise_conv2d,
        "max_pool": conv.max_pool,
        "pool": conv.pool,
        "separable_conv2d": conv.separable_conv2d,
        "softsign": softsign,
    },
    "tensorflow:nn.experimental": {
        "stateless_dropout": random.stateless_dropout,
    },
    "tensorflow:raw_ops": {
        "ImageProjectiveTransformV3": images.projective_transform,
    },
    "tensorflow:random": {
        "stateless_binomial": random.refused("stateless_binomial"),
        "stateless_categorical": random.stateless_categorical,
        "stateless_gamma": random.refused("stateless_gamma"),
        "stateless_normal": random.stateless_normal,
        "stateless_truncated_normal": random.refused(
            "stateless_truncated_normal"
        ),
        "stateless_uniform": random.stateless_uniform,
    },
}
_RULES = {
    (owner, name): rule
    for owner, rules in _RULES_BY_OWNER.items()
    for name, rule in rules.items()
}


class _Functions:
    """The functions that have a rule, as one attribute for the hook table."""

    _last = None

    @property
    def by_name(self):
        """Dict of `(owner, name)` to the function that is in place now.

        The same object until a function changes. Setting it puts the functions
        in place.
        """
        found = {key: getattr(_owner(key), key[1]) for key in _RULES}
        if found != self._last:
            self._last = found
        return self._last

    @by_name.setter
    def by_name(self, functions):
        for key, function in functions.items():
            setattr(_owner(key), key[1], function)
        self._last = functions


functions = _Functions()


def _owner(key):
    """Returns a function's owner; raises an error if the function has moved."""
    return Hook(*key, None, "an operation on a mesh has a rule").resolve()


def with_rules(original):
    """Returns a dict like `original`, of functions that apply the rules."""
    return {key: _on_mesh(rule, original[key]) for key, rule in _RULES.items()}


def _on_mesh(rule, original):
    """Returns a function that applies the rule on a mesh only."""

    @functools.wraps(original)
    def function(*args, **kwargs):
        if placement.current_mesh() is not None:
            return rule(original, *args, **kwargs)
        # Off the mesh the original is right for a trace, which only infers
        # shapes, and for a variable, which is read whole.
        for x in args if tf.executing_eagerly() else ():
            is_variable = isinstance(x, dtensor.DVariable)
            if placement.is_dtensor(x) and not is_variable:
                with placement.on_mesh(dtensor.fetch_layout(x).mesh):
                    return rule(original, *args, **kwargs)
        return original(*args, **kwargs)

    return function


ROW = Hook(
    f"{__name__}:functions",
    "by_name",
    with_rules,
    "operations that DTensor cannot split, or splits incorrectly, have rules",
)
