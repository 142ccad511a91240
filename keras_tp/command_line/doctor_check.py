"""Run by `doctor`: one row-parallel kernel, and what its step communicates."""

import json

import keras
import numpy as np

from keras_tp import distribution as dist

devices = dist.list_devices()
mesh = dist.DeviceMesh((1, len(devices)), ["batch", "model"], devices)
layout_map = dist.LayoutMap(mesh)
layout_map[".*up/kernel"] = (None, "model")
layout_map[".*down/kernel"] = ("model", None)
width = 4 * len(devices)
x = np.linspace(-1, 1, 4 * 8).reshape(4, 8).astype("float32")
with dist.ModelParallel(layout_map=layout_map).scope():
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(width, use_bias=False, name="up"),
            keras.layers.Dense(8, use_bias=False, name="down"),
        ]
    )
up, down = (keras.ops.convert_to_numpy(v.value) for v in model.weights)
expected = x @ up @ down
difference = np.max(np.abs(model.predict(x, verbose=0) - expected))
counted = dist.count_collectives(model, x)
print(
    json.dumps(
        {
            "devices": devices,
            "all_reduce": counted.get("all_reduce", (0, 0)),
            "difference": float(difference),
        }
    )
)
