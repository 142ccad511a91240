"""The CTC loss for batches that may be split.

TensorFlow's `ctc_loss` uses a loop over lists and a scatter. DTensor supports
neither. Here the frames are unrolled, like the steps of recurrent layers. For
the sums over alignments see Graves et al., 2006,
https://www.cs.toronto.edu/~graves/icml_2006.pdf, section 4.1.
"""

import tensorflow as tf
from keras.src import backend as keras_backend

from keras_tp.backend.tensorflow import placement
from keras_tp.backend.tensorflow.ops import sorting

# Stands for log(0): its exponential is 0, whatever is added to it.
_NEVER = -1e30
# TensorFlow's log(0) at the start and the end of an alignment: log(1e-307). It
# is visible for samples that are too short for their labels.
_IMPOSSIBLE = -706.8936


def ctc_loss(
    original, target, output, target_length, output_length, mask_index=0
):
    """Sums over the alignments of each sample, frame by frame."""
    logits, labels = tf.convert_to_tensor(output), _placed(target)
    label_count, frame_count = _placed(target_length), _placed(output_length)
    if None in (*logits.shape[1:], *labels.shape[1:]):
        raise ValueError(
            "Under a distribution, `ctc_loss` needs shapes that are known when "
            "the step is traced, except for the batch dim. Received: target "
            f"with shape={tuple(labels.shape)}, output with "
            f"shape={tuple(logits.shape)}"
        )
    dtype = keras_backend.result_type(logits.dtype, "float32")
    logits = tf.cast(logits, "float32")
    # A blank before each label, and one at the end.
    blanks = tf.zeros_like(labels) + mask_index
    states = [tf.expand_dims(x, 2) for x in (blanks, labels)]
    size = 2 * labels.shape[1]
    rows = -1 if labels.shape[0] is None else labels.shape[0]
    states = tf.reshape(tf.concat(states, 2), [rows, size])
    states = tf.concat([states, blanks[:, :1]], 1)
    # A blank may be left out between labels that differ.
    differs = tf.logical_and(
        states[:, 2:] != states[:, :-2], states[:, 2:] != mask_index
    )
    skipped = tf.where(differs, 0.0, _NEVER)
    numbers = sorting.numbers(size + 1, tf.int32)[None, :]
    last = 2 * label_count[:, None] - numbers
    is_end = tf.logical_or(last == 0, last == 1)
    ends = tf.where(is_end, 0.0, _IMPOSSIBLE)
    seen = tf.einsum(
        "btc,bsc->tbs",
        tf.nn.log_softmax(logits),
        tf.one_hot(states, logits.shape[2], dtype=tf.float32),
    )
    return tf.cast(_loss(seen, skipped, ends, frame_count[:, None]), dtype)


def _placed(value):
    """Returns an int32 tensor; replicates it if it is eager and plain."""
    value = tf.convert_to_tensor(value)
    if tf.executing_eagerly() and not placement.is_dtensor(value):
        value = placement.replicated(value)
    return tf.cast(value, tf.int32)


@placement.custom_gradient
def _loss(seen, skipped, ends, frame_count):
    """Returns the negative log-likelihood of each sample.

    `seen`, `(frames, batch, states)`, has the log-probability of each state in
    each frame. `skipped`, `(batch, states - 2)`, is 0 for states that can be
    reached by skipping one, `_NEVER` for the others. `ends`, `(batch, states)`,
    is 0 where an alignment may end. `frame_count` is `(batch, 1)`.
    """
    seen = tf.unstack(seen)
    nowhere = tf.zeros_like(ends[:, :1]) + _NEVER
    rest = tf.zeros_like(ends[:, 2:]) + _NEVER
    # The first frame is a blank or the first label.
    starts = tf.concat([tf.zeros_like(ends[:, :2]), rest], 1)

    def before(beta):
        """Returns the log-sum over the states that may come next."""
        step = tf.concat([beta[:, 1:], nowhere], 1)
        skip = tf.concat([beta[:, 2:] + skipped, nowhere, nowhere], 1)
        return _log_sum(beta, step, skip)

    def after(alpha):
        """Returns the log-sum over the states that may come before."""
        step = tf.concat([nowhere, alpha[:, :-1]], 1)
        skip = tf.concat([nowhere, nowhere, alpha[:, :-2] + skipped], 1)
        return _log_sum(alpha, step, skip)

    # Log-sums over the frames after each frame, from the last one back.
    betas = [ends]
    for t in range(len(seen) - 1, 0, -1):
        beta = before(betas[0] + seen[t])
        betas.insert(0, tf.where(t < frame_count, beta, ends))
    total = tf.reduce_logsumexp(starts + seen[0] + betas[0], 1)
    total = tf.where(frame_count[:, 0] > 0, total, _IMPOSSIBLE)

    def gradient(dy):
        alpha, found = tf.zeros_like(ends) + _IMPOSSIBLE, []
        for t, (frame, beta) in enumerate(zip(seen, betas)):
            alpha = after(alpha)
            if t == 0:
                alpha = tf.maximum(alpha, starts)
            alpha = alpha + frame
            share = tf.nn.softmax(alpha + beta) * -dy[:, None]
            found.append(tf.where(t < frame_count, share, 0.0))
        found = sorting.gathered(tf.stack(found), 0)
        return found, None, None, None

    return -total, gradient


def _log_sum(a, b, c):
    largest = tf.maximum(tf.maximum(a, b), c)
    total = tf.exp(a - largest) + tf.exp(b - largest) + tf.exp(c - largest)
    return largest + tf.math.log(total)
