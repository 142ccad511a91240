# %% [markdown]
# # Layouts written by hand
#
# A `LayoutMap` says how variables are split, by patterns of their paths. This
# notebook checks such a map before anything is trained, corrects it, trains,
# and saves a checkpoint that another mesh loads.
#
# One process has four virtual CPU devices; the variables have to be set before
# Keras is imported.

# %%
import os

os.environ.setdefault("KERAS_BACKEND", "jax")  # or "tensorflow"
os.environ["JAX_NUM_CPU_DEVICES"] = "4"  # for JAX
os.environ["KERAS_TP_CPU_DEVICES"] = "4"  # for TensorFlow

import keras
import numpy as np
from keras import layers

from keras_tp import distribution as dist


def build_model():
    """Returns a small model."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((64,))
    x = layers.Dense(256, activation="gelu", name="up")(inputs)
    x = inputs + layers.Dense(64, name="down")(x)
    return keras.Model(inputs, layers.Dense(8, name="head")(x), name="mlp")


# %% [markdown]
# ## A first attempt
#
# `up` is split along its outputs and `down` along its inputs, so each device
# computes a quarter of the hidden units. One pattern has a typing error.

# %%
mesh = dist.DeviceMesh((1, 4), ["batch", "model"])
layout_map = dist.LayoutMap(mesh)
layout_map["up/kernel"] = (None, "model")
layout_map["up/bais"] = ("model",)
layout_map["down/kernel"] = ("model", None)

# %% [markdown]
# ## Check it
#
# `report` names patterns that match nothing, with the nearest paths. `compare`
# asks the planner what it would do better.

# %%
for problem in layout_map.report(build_model()).problems():
    print(problem)

# %%
plan = dist.plan_sharding(build_model, mesh)
for path, message in plan.compare(layout_map):
    print(f"{path}: {message}")

# %% [markdown]
# `python -m keras_tp lint model.py:build_model model.py:layout_map` does both
# on the command line.
#
# ## Correct it
#
# The plan would split `head`, too. It is small, and is left whole here.

# %%
del layout_map["up/bais"]
layout_map["up/bias"] = ("model",)

assert not layout_map.report(build_model()).problems()
for path, message in plan.compare(layout_map):
    print(f"{path}: {message}")

# %% [markdown]
# A layout that does not fit is an error, which says what would fit.

# %%
wrong = dist.LayoutMap(mesh)
wrong["head/kernel"] = (None, None, "model")
try:
    with dist.ModelParallel(layout_map=wrong).scope():
        build_model()
except ValueError as e:
    print(e)

# %% [markdown]
# ## Train it

# %%
distribution = dist.ModelParallel(layout_map=layout_map)
with distribution.scope():
    model = build_model()
    model.compile("adam", "mse")

rng = np.random.default_rng(0)
x = rng.normal(size=(128, 64)).astype("float32")
y = x[:, :8] * x[:, 8:16]
model.fit(x, y, epochs=3, verbose=2)
print(dist.describe(model))

# %% [markdown]
# One all-reduce in a step, after `down`, and nothing is gathered.

# %%
dist.count_collectives(model, x[:32], y[:32])

# %% [markdown]
# ## Save it, and load it on another mesh
#
# Each device writes its own part. A mesh of another shape reads the parts that
# it needs, and training goes on with the optimizer's state.

# %%
dist.save_checkpoint("checkpoint", model)
sorted(os.listdir("checkpoint"))

# %%
other_mesh = dist.DeviceMesh((2, 2), ["batch", "model"])
with dist.TensorParallel(other_mesh).scope():
    again = build_model()
    again.compile("adam", "mse")
dist.load_checkpoint("checkpoint", again)

np.testing.assert_allclose(
    again.predict(x, verbose=0), model.predict(x, verbose=0), atol=1e-5
)
again.fit(x, y, epochs=1, verbose=2)
print(dist.describe(again).device_bytes)
