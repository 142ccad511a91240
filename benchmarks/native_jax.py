"""The decoder of `decoder.py` written by hand with `shard_map`, without Keras.

Megatron-LM's splits: each device computes with its part of the weights, and
the collectives are explicit. The gradient of a replicated tensor that several
split kernels read is summed once: `_enter` marks where it enters them.
"""

import re

import decoder
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

# Keras's defaults.
NORM_EPSILON = 1e-3
BETA_1 = 0.9
BETA_2 = 0.999
ADAM_EPSILON = 1e-7


def make_mesh(device_count):
    """Returns the mesh that `decoder.distribution_of` makes."""
    devices = np.array(jax.devices()[:device_count]).reshape(1, -1)
    return jax.sharding.Mesh(devices, ("batch", "model"))


def spec_of(path):
    """Returns how `decoder.LAYOUTS` splits a variable."""
    for pattern, axes in decoder.LAYOUTS.items():
        if re.fullmatch(pattern, path):
            return PartitionSpec(*axes)
    return PartitionSpec()


def _enter(x):
    """Marks a replicated tensor that column-parallel kernels read.

    Its gradient is one all-reduce, after the gradients of all kernels are
    added on each device.
    """
    return lax.pcast(x, "model", to="varying")


def _normalize(weights, name, x):
    mean = jnp.mean(x, -1, keepdims=True)
    variance = jnp.var(x, -1, keepdims=True)
    x = (x - mean) * lax.rsqrt(variance + NORM_EPSILON)
    return x * weights[f"{name}/gamma"] + weights[f"{name}/beta"]


def _column(weights, name, equation, x):
    """Column-parallel: each device has its part of the output."""
    y = jnp.einsum(equation, x, weights[f"{name}/kernel"])
    return y + weights[f"{name}/bias"]


def _row(weights, name, equation, x):
    """Row-parallel: one all-reduce, then the bias."""
    y = lax.psum(jnp.einsum(equation, x, weights[f"{name}/kernel"]), "model")
    return y + weights[f"{name}/bias"]


def _position(ids, size):
    """Returns where ids are in this device's part, and which of them are."""
    local = ids - size * lax.axis_index("model")
    held = (local >= 0) & (local < size)
    return jnp.where(held, local, 0), held


def _look_up(table, tokens):
    """Each device looks up the rows that it holds."""
    position, held = _position(tokens, table.shape[0])
    rows = jnp.where(held[..., None], table[position], 0.0)
    return lax.psum(rows, "model")


def _attend(weights, name, x):
    x = _enter(x)
    query, key, value = (
        _column(weights, f"{name}/{part}", "btd,dhk->bthk", x)
        for part in ("query", "key", "value")
    )
    y = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    return _row(weights, f"{name}/attention_output", "bthk,hkd->btd", y)


def _logits(weights, layers, tokens):
    """Returns this device's part of the logits."""
    x = _look_up(weights["tokens/embeddings"], tokens)
    for i in range(layers):
        y = _normalize(weights, f"{i}_norm_a", x)
        x += _attend(weights, f"{i}_attention", y)
        y = _enter(_normalize(weights, f"{i}_norm_b", x))
        y = _column(weights, f"{i}_up", "btd,df->btf", y)
        y = jax.nn.gelu(y, approximate=False)
        x += _row(weights, f"{i}_down", "btf,fd->btd", y)
    return _column(weights, "logits", "btd,dv->btv", _enter(x))


def _cross_entropy(logits, targets):
    """Returns the mean loss of logits that are split over the vocabulary."""
    largest = lax.pmax(jnp.max(lax.stop_gradient(logits), -1), "model")
    logits -= largest[..., None]
    position, held = _position(targets, logits.shape[-1])
    own = jnp.take_along_axis(logits, position[..., None], -1)[..., 0]
    total, own = lax.psum(
        (jnp.sum(jnp.exp(logits), -1), jnp.where(held, own, 0.0)), "model"
    )
    return lax.pmean(jnp.mean(jnp.log(total) - own), "batch")


class Trainer:
    """The model, Adam and the train loop.

    Args:
        options: Namespace of `step_time.py`'s options.
        weights: Dict of a variable's path in the Keras model to its value.
        device_count: Int, number of devices of the model axis.
    """

    def __init__(self, options, weights, device_count):
        self.layers = options.layers
        mesh = make_mesh(device_count)
        specs = {path: spec_of(path) for path in weights}
        whole = PartitionSpec()
        state_specs = (specs, specs, specs, whole, whole)
        batch_spec = PartitionSpec("batch")
        self.batch_sharding = NamedSharding(mesh, batch_spec)
        zeros = {path: np.zeros_like(value) for path, value in weights.items()}
        self.state = jax.device_put(
            (weights, zeros, zeros, np.float32(0), np.float32(0)),
            jax.tree.map(lambda spec: NamedSharding(mesh, spec), state_specs),
        )
        step = jax.shard_map(
            self._step,
            mesh=mesh,
            in_specs=(state_specs, batch_spec, batch_spec),
            out_specs=state_specs,
        )
        self.step = jax.jit(step, donate_argnums=0)

    def _step(self, state, tokens, targets):
        weights, first, second, count, total = state

        def loss_of(weights):
            logits = _logits(weights, self.layers, tokens)
            return _cross_entropy(logits, targets)

        loss, gradients = jax.value_and_grad(loss_of)(weights)
        count += 1.0
        rate = decoder.LEARNING_RATE * jnp.sqrt(1.0 - BETA_2**count)
        rate /= 1.0 - BETA_1**count
        first = jax.tree.map(
            lambda m, g: m + (g - m) * (1 - BETA_1), first, gradients
        )
        second = jax.tree.map(
            lambda v, g: v + (g * g - v) * (1 - BETA_2), second, gradients
        )
        weights = jax.tree.map(
            lambda w, m, v: w - rate * m / (jnp.sqrt(v) + ADAM_EPSILON),
            *(weights, first, second),
        )
        return weights, first, second, count, total + loss

    def train_epoch(self, x, y):
        """Trains one epoch and waits for its end only.

        Args:
            x: Array of tokens, on the host.
            y: Array of targets, on the host.

        Returns:
            The mean loss.
        """
        before = float(self.state[-1])
        count = len(x) // decoder.BATCH_SIZE
        for i in range(count):
            rows = slice(i * decoder.BATCH_SIZE, (i + 1) * decoder.BATCH_SIZE)
            batch = jax.device_put((x[rows], y[rows]), self.batch_sharding)
            self.state = self.step(self.state, *batch)
        return (float(self.state[-1]) - before) / count
