# %% [markdown]
# # An ordinary Keras model on four devices
#
# This notebook splits a small transformer over four devices: look at the plan,
# train, and see what each device holds. The model is unmodified Keras.
#
# No accelerator is needed. One process has four virtual CPU devices; the
# variables have to be set before Keras is imported. With torch, each device
# needs a process of its own: see `torch_processes.ipynb`.

# %%
import os

os.environ.setdefault("KERAS_BACKEND", "jax")  # or "tensorflow"
os.environ["JAX_NUM_CPU_DEVICES"] = "4"  # for JAX
os.environ["KERAS_TP_CPU_DEVICES"] = "4"  # for TensorFlow

import keras
import numpy as np
from keras import layers

from keras_tp import distribution as dist

dist.list_devices()

# %% [markdown]
# ## The model
#
# It learns to count: each token is the one before plus one.

# %%
VOCABULARY, LENGTH, WIDTH = 64, 16, 64


def build_model():
    """Returns a small model."""
    keras.utils.set_random_seed(0)
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(VOCABULARY, WIDTH, name="embedding")(tokens)
    for _ in range(2):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(4, WIDTH // 4)(
            y, y, use_causal_mask=True
        )
        y = layers.LayerNormalization()(x)
        y = layers.Dense(4 * WIDTH, activation="gelu")(y)
        x = x + layers.Dense(WIDTH)(y)
    logits = layers.Dense(VOCABULARY, name="logits")(x)
    model = keras.Model(tokens, logits, name="counter")
    model.compile(
        keras.optimizers.SGD(0.1, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


starts = np.random.default_rng(0).integers(0, VOCABULARY, (256, 1))
sequences = (starts + np.arange(LENGTH + 1)) % VOCABULARY
x, y = sequences[:, :-1], sequences[:, 1:]

# %% [markdown]
# ## The plan
#
# The mesh has one replica of the model, which four devices share. The plan
# reads the model's dataflow and says how each variable is split. It allocates
# no weights.

# %%
mesh = dist.DeviceMesh((1, 4), ["batch", "model"])
plan = dist.plan_sharding(build_model, mesh)
plan

# %%
print(plan.summary())

# %% [markdown]
# ## Train it
#
# Build the model in the scope of the distribution. Everything else is plain
# Keras.

# %%
with plan.distribution().scope():
    model = build_model()

# In the same order as on one device, below.
settings = {"batch_size": 32, "epochs": 8, "shuffle": False}
history = model.fit(x, y, **settings, verbose=2)

# %% [markdown]
# The losses are those of one device, but for rounding.

# %%
one_device = build_model().fit(x, y, **settings, verbose=0)
print("4 devices:", np.round(history.history["loss"], 5))
print("1 device: ", np.round(one_device.history["loss"], 5))
np.testing.assert_allclose(
    history.history["loss"], one_device.history["loss"], rtol=1e-4
)

# %% [markdown]
# ## What each device holds
#
# `describe` reads the live arrays: weights, and the slots of the optimizer.

# %%
report = dist.describe(model)
report

# %%
for device, size in report.device_bytes.items():
    print(f"{device}: {size / 1024:.1f} of {report.total_bytes / 1024:.1f} KiB")

# %% [markdown]
# One kernel: each device has a quarter of its columns.

# %%
print(dist.visualize(model.get_layer("logits").kernel))

# %% [markdown]
# ## What the devices send
#
# `count_collectives` reads the compiled step. It has all that the plan
# predicts. XLA on CPUs sums the gradients of queries, keys and values one by
# one, and a loss over a split vocabulary adds all-reduces of one number for
# each token. No weight is gathered.

# %%
counted = dist.count_collectives(model, x[:32], y[:32])
print("predicted:", plan.collectives(batch_size=32))
print("counted:  ", {kind: c for kind, c in counted.items() if c.count})
assert counted["all_gather"].count == 0

# %% [markdown]
# ## Save it
#
# A plain Keras file, which loads anywhere, and the plan as a page to open in a
# browser.

# %%
model.save("counter.keras")
plan.to_html("plan.html", batch_size=32)

again = keras.models.load_model("counter.keras")  # on one device
np.testing.assert_allclose(
    again.predict(x[:4], verbose=0), model.predict(x[:4], verbose=0), atol=1e-4
)
print("given:    ", x[0])
print("predicted:", again.predict(x[:1], verbose=0)[0].argmax(axis=-1))
