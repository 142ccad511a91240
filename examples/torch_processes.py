# %% [markdown]
# # A Keras model on two torch processes
#
# On torch each device has a process of its own, and a notebook is one process.
# So the training is a script: this notebook writes it, launches it on two
# processes, and looks at what it left behind.

# %%
# %env KERAS_BACKEND=torch
# %env OMP_NUM_THREADS=1

# %% [markdown]
# ## The script
#
# Every process runs all of it. `launch` shows the output of process 0.

# %%
# %%writefile train.py
import keras
import numpy as np
from keras import layers

from keras_tp import distribution as dist

# All processes have to build the same model.
keras.utils.set_random_seed(0)
inputs = keras.Input((64,))
x = layers.Dense(256, activation="gelu", name="up")(inputs)
model = keras.Model(inputs, layers.Dense(64, name="down")(x))

mesh = dist.DeviceMesh((1, 2), ["batch", "model"])
plan = dist.plan_sharding(model, mesh)
dist.distribute_model(model, plan.distribution())
model.compile("adam", "mse")

data = np.random.default_rng(0).normal(size=(128, 64)).astype("float32")
model.fit(data, data, epochs=3, verbose=2)

print(dist.describe(model))
print(dist.count_collectives(model, data, data))
model.save("model.keras")
plan.save("plan.json")

# %% [markdown]
# ## Run it

# %%
# !python -m keras_tp.launch --devices 2 train.py

# %% [markdown]
# ## Look at it
#
# The plan is a file that any process can read, without the devices.

# %%
from keras_tp import distribution as dist

plan = dist.ShardingPlan.load("plan.json")
plan

# %% [markdown]
# The model is a plain Keras file. Here it is loaded on one device.

# %%
import keras

model = keras.models.load_model("model.keras")
model.summary()
