"""Small models whose structure, not their size, is what a plan meets."""

import keras
from keras import layers


def blocks(mixer):
    """Two blocks of a transformer between layers that are whole."""

    def build():
        inputs = keras.Input((6, 12))
        x = layers.Dense(32, name="open")(inputs)
        for k in range(2):
            h = layers.LayerNormalization(name=f"norm_{k}_a")(x)
            x = x + mixer(k, h)
            h = layers.LayerNormalization(name=f"norm_{k}_b")(x)
            h = layers.Dense(48, activation="gelu", name=f"up_{k}")(h)
            x = x + layers.Dense(32, name=f"down_{k}")(h)
        x = layers.LayerNormalization(name="norm")(x)
        return keras.Model(inputs, x, name="blocks")

    return build


def attention(k, x):
    return layers.MultiHeadAttention(4, 8, name=f"attention_{k}")(x, x)


def grouped(k, x):
    """Heads of keys that are fewer than four devices."""
    return layers.GroupQueryAttention(8, 8, 2, name=f"attention_{k}")(x, x)


def gated(k, x):
    gate = layers.Dense(24, activation="silu", name=f"gate_{k}")(x)
    x = gate * layers.Dense(24, name=f"wide_{k}")(x)
    return layers.Dense(32, name=f"narrow_{k}")(x)


def _attend(k, q, key, v):
    ops = keras.ops
    scores = ops.softmax(ops.einsum("bthd,bshd->bhts", q, key))
    return layers.EinsumDense(
        "bthd,hdm->btm", (None, 32), bias_axes="m", name=f"out_{k}"
    )(ops.einsum("bhts,bshd->bthd", scores, v))


def fused_own_dim(k, x):
    """Queries, keys and values by one kernel, in a dim of their own."""
    x = layers.EinsumDense(
        "btm,mchd->btchd", (None, 3, 4, 8), bias_axes="chd", name=f"qkv_{k}"
    )(x)
    return _attend(k, x[:, :, 0], x[:, :, 1], x[:, :, 2])


def fused_in_heads(k, x):
    """In one dim: each head with its query, key and value."""
    x = layers.Dense(96, name=f"qkv_{k}")(x)
    x = layers.Reshape((6, 4, 3, 8))(x)
    return _attend(k, *keras.ops.unstack(x, 3, axis=3))


def fused_flat(k, x):
    """In one dim: all queries, then all keys, then all values."""
    x = layers.Dense(96, name=f"qkv_{k}")(x)
    parts = keras.ops.split(x, 3, axis=-1)
    return _attend(k, *(layers.Reshape((6, 4, 8))(part) for part in parts))


def merged_heads(k, x):
    """Heads and batch in one dim, as vision models have them."""
    ops = keras.ops

    def project(name):
        y = layers.Dense(32, name=f"{name}_{k}")(x)
        y = ops.transpose(ops.reshape(y, (-1, 6, 4, 8)), (0, 2, 1, 3))
        return ops.reshape(y, (-1, 6, 8))

    q, key, v = project("query"), project("key"), project("value")
    scores = ops.softmax(ops.matmul(q, ops.transpose(key, (0, 2, 1))))
    y = ops.reshape(ops.matmul(scores, v), (-1, 4, 6, 8))
    y = ops.reshape(ops.transpose(y, (0, 2, 1, 3)), (-1, 6, 32))
    return layers.Dense(32, name=f"out_{k}")(y)


class Nameless(keras.Model):
    """Attention and a pair whose names say nothing."""

    def __init__(self):
        super().__init__()
        self.x1 = [layers.Dense(32) for _ in range(4)]
        self.x2 = layers.LayerNormalization()
        self.x3 = layers.Dense(48, activation="relu")
        self.x4 = layers.Dense(32)

    def call(self, x):
        ops = keras.ops
        x = self.x2(x)
        q, k, v = (
            ops.reshape(layer(x), (-1, 6, 4, 8)) for layer in self.x1[:3]
        )
        scores = ops.einsum("bthd,bshd->bhts", q, k)
        mixed = ops.einsum("bhts,bshd->bthd", ops.softmax(scores), v)
        x = x + self.x1[3](ops.reshape(mixed, (-1, 6, 32)))
        return self.x4(self.x3(self.x2(x)))


class LearnedQueries(layers.Layer):
    """A few queries, the same for all examples, attend to all positions."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.up = layers.Dense(48, activation="relu", name="up")
        self.down = layers.Dense(32, name="down")
        self.q, self.k, self.v, self.o = (
            layers.Dense(32, name=name) for name in ("q", "k", "v", "o")
        )

    def build(self, shape):
        self.queries = self.add_weight(shape=(1, 6, 32), name="queries")
        for layer in (self.up, self.q, self.k, self.v, self.o):
            layer.build((None, None, 32))
        self.down.build((None, None, 48))

    def call(self, x):
        ops = keras.ops
        queries = ops.tile(self.queries, (ops.shape(x)[0], 1, 1))
        queries = self.down(self.up(queries))
        q = ops.reshape(self.q(queries), (-1, 6, 4, 8))
        k, v = (
            ops.reshape(layer(x), (-1, 16, 4, 8)) for layer in (self.k, self.v)
        )
        scores = ops.softmax(ops.einsum("bthd,bshd->bhts", q, k))
        mixed = ops.einsum("bhts,bshd->bthd", scores, v)
        return self.o(ops.reshape(mixed, (-1, 6, 32)))


def learned_queries():
    inputs = keras.Input((16, 32))
    x = LearnedQueries(name="queries")(inputs)
    return keras.Model(inputs, layers.LayerNormalization(name="norm")(x))


def shared():
    inputs = keras.Input((16,))
    norm = layers.LayerNormalization(name="norm")
    up = layers.Dense(24, activation="relu", name="up")
    down = layers.Dense(16, name="down")
    x = inputs
    for _ in range(2):
        x = norm(x + down(up(x)))
    return keras.Model(inputs, x)


def nested():
    inputs = keras.Input((16,))
    inner = keras.Sequential(
        [layers.Dense(24, activation="relu"), layers.Dense(16)], name="inner"
    )
    x = layers.LayerNormalization()(inner(inputs))
    return keras.Model(inputs, inner(x))


def several():
    a, b = keras.Input((16,), name="a"), keras.Input((12,), name="b")
    x = layers.Concatenate()(
        [layers.Dense(24, name="up_a")(a), layers.Dense(24, name="up_b")(b)]
    )
    x = layers.Dense(16, name="down")(x)
    x = layers.LayerNormalization(name="norm")(x)
    y = layers.Dense(24, activation="relu", name="up")(x)
    return keras.Model(
        {"a": a, "b": b}, {"x": x, "y": layers.Dense(8, name="end")(y)}
    )


def with_lambda():
    inputs = keras.Input((16,))
    x = layers.Dense(24, name="up")(inputs)
    x = layers.Lambda(lambda t: keras.ops.square(t) + 1.0)(x)
    return keras.Model(inputs, layers.Dense(12, name="down")(x))


def nameless():
    """A subclassed model, built by its first call."""
    model = Nameless()
    model(keras.ops.zeros((1, 6, 32)))
    return model
