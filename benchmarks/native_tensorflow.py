"""The decoder of `decoder.py` written by hand for DTensor, without Keras."""

import re

import decoder
import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

# Keras's defaults.
NORM_EPSILON = 1e-3
BETA_1 = 0.9
BETA_2 = 0.999
ADAM_EPSILON = 1e-7


def make_mesh(options):
    """Returns the mesh that `decoder.distribution_of` makes."""
    return dtensor.create_mesh(
        [("batch", 1), ("model", options.devices)],
        devices=[f"CPU:{i}" for i in range(options.devices)],
    )


def layout_of(path, shape, mesh):
    """Returns the layout that `decoder.LAYOUTS` has for a variable."""
    for pattern, axes in decoder.LAYOUTS.items():
        if re.fullmatch(pattern, path):
            return dtensor.Layout([a or dtensor.UNSHARDED for a in axes], mesh)
    return dtensor.Layout.replicated(mesh, len(shape))


def pack(value, layout):
    """Puts an array on the devices of a mesh."""
    parts = [value]
    for dim, axis in enumerate(layout.sharding_specs):
        if axis != dtensor.UNSHARDED:
            parts = np.split(value, layout.mesh.dim_size(axis), axis=dim)
    if len(parts) == 1:
        parts = [value] * layout.mesh.size
    return dtensor.pack([tf.constant(part) for part in parts], layout)


class Trainer:
    """The model, Adam and the train loop.

    Args:
        options: Namespace of `step_time.py`'s options.
        weights: Dict of a variable's path in the Keras model to its value.
    """

    def __init__(self, options, weights):
        self.mesh = make_mesh(options)
        self.layers = options.layers
        self.weights, self.first, self.second = {}, {}, {}
        for path, value in weights.items():
            layout = layout_of(path, value.shape, self.mesh)
            for group in (self.weights, self.first, self.second):
                start = value if group is self.weights else 0 * value
                group[path] = dtensor.DVariable(pack(start, layout))
        scalar = dtensor.Layout.replicated(self.mesh, 0)
        self.iterations, self.total = (
            dtensor.DVariable(pack(np.float32(0), scalar)) for _ in range(2)
        )
        length = decoder.SEQUENCE_LENGTH
        mask = np.triu(np.full((length, length), -1e9, "float32"), 1)
        self.mask = pack(mask, dtensor.Layout.replicated(self.mesh, 2))
        self.step = tf.function(self._step)

    def _normalize(self, x, name):
        mean, variance = tf.nn.moments(x, -1, keepdims=True)
        x = (x - mean) * tf.math.rsqrt(variance + NORM_EPSILON)
        return x * self.weights[f"{name}/gamma"] + self.weights[f"{name}/beta"]

    def _dense(self, equation, x, name):
        kernel = self.weights[f"{name}/kernel"]
        return tf.einsum(equation, x, kernel) + self.weights[f"{name}/bias"]

    def _attend(self, x, name):
        query, key, value = (
            self._dense("btd,dhk->bthk", x, f"{name}/{part}")
            for part in ("query", "key", "value")
        )
        query *= decoder.HEAD_SIZE**-0.5
        scores = tf.einsum("bthk,bshk->bhts", query, key) + self.mask
        y = tf.einsum("bhts,bshk->bthk", tf.nn.softmax(scores), value)
        return self._dense("bthk,hkd->btd", y, f"{name}/attention_output")

    def _look_up(self, tokens):
        """Each device looks up the rows it holds; all of them are summed."""
        parts = self.mesh.dim_size("model")
        size = decoder.VOCABULARY // parts
        flat = tf.reshape(tokens, [-1])

        @tf.custom_gradient
        def look_up(table):
            width = table.shape[-1]
            table = tf.reshape(table, [parts, size, width])
            local = flat[None, :] - size * tf.range(parts)[:, None]
            held = tf.logical_and(local >= 0, local < size)
            rows = tf.gather(
                table, tf.where(held, local, 0), axis=1, batch_dims=1
            )
            rows = tf.where(tf.expand_dims(held, -1), rows, 0.0)

            def gradient(dy):
                return tf.math.unsorted_segment_sum(
                    tf.reshape(dy, [-1, width]), flat, decoder.VOCABULARY
                )

            rows = tf.reduce_sum(rows, 0)
            return tf.reshape(rows, [*tokens.shape, width]), gradient

        return look_up(self.weights["tokens/embeddings"].read_value())

    def _logits(self, tokens):
        x = self._look_up(tokens)
        for i in range(self.layers):
            y = self._normalize(x, f"{i}_norm_a")
            x += self._attend(y, f"{i}_attention")
            y = self._normalize(x, f"{i}_norm_b")
            y = tf.nn.gelu(self._dense("btd,df->btf", y, f"{i}_up"))
            x += self._dense("btf,fd->btd", y, f"{i}_down")
        return self._dense("btd,dv->btv", x, "logits")

    def _step(self, tokens, targets):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(
                    targets, self._logits(tokens)
                )
            )
        gradients = tape.gradient(loss, self.weights)
        step = self.iterations.assign_add(1.0)
        rate = decoder.LEARNING_RATE * tf.sqrt(1.0 - tf.pow(BETA_2, step))
        rate /= 1.0 - tf.pow(BETA_1, step)
        for path, weight in self.weights.items():
            gradient = tf.convert_to_tensor(gradients[path])
            first, second = self.first[path], self.second[path]
            first.assign_add((gradient - first) * (1 - BETA_1))
            second.assign_add((gradient**2 - second) * (1 - BETA_2))
            weight.assign_sub(rate * first / (tf.sqrt(second) + ADAM_EPSILON))
        self.total.assign_add(loss)

    def train_epoch(self, batches):
        """Trains one epoch; only its end is waited for.

        Args:
            batches: `tf.data.Dataset` of tokens and targets.

        Returns:
            The mean loss.
        """
        layout = dtensor.Layout.replicated(self.mesh, 2)
        with dtensor.default_mesh(self.mesh):
            self.total.assign(tf.zeros_like(self.total))
        count = 0
        for batch in batches:
            placed = [
                dtensor.pack([part] * self.mesh.size, layout) for part in batch
            ]
            with dtensor.default_mesh(self.mesh):
                self.step(*placed)
            count += 1
        return float(self.total.read_value().numpy()) / count
