"""Plans a Llama of 70 B parameters with its head, without its weights.

    KERAS_BACKEND=torch python benchmarks/plan_large.py

Prints, as one line of JSON for each mesh: seconds, the peak memory of the
process in MiB, the bytes on one device in a training step and what that step
communicates. Neither devices nor memory for the model are needed.
"""

import json
import math
import pathlib
import re
import time

import keras
import keras_hub

from keras_tp import distribution

MESHES = (1, 8), (8, 8)
BATCH_SIZE = 8
LENGTH = 4096
LLAMA = {
    "vocabulary_size": 32000,
    "num_layers": 80,
    "num_query_heads": 64,
    "num_key_value_heads": 8,
    "hidden_dim": 8192,
    "intermediate_dim": 28672,
    "dtype": "bfloat16",
}


def build():
    """Returns the model; only its structure is made where it is planned."""
    backbone = keras_hub.models.LlamaBackbone(**LLAMA)
    return keras_hub.models.LlamaCausalLM(backbone, preprocessor=None)


def peak_memory():
    """Returns the most that this process ever used, in MiB, on Linux.

    What `resource` reports begins with the memory of the parent process.
    """
    status = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) // 1024


def main():
    """Plans it on each mesh and prints what that took and what it says."""
    for shape in MESHES:
        devices = [f"gpu:{i}" for i in range(math.prod(shape))]
        mesh = keras.distribution.DeviceMesh(shape, ["batch", "model"], devices)
        began = time.perf_counter()
        plan = distribution.plan_sharding(build, mesh)
        memory = plan.memory(BATCH_SIZE, LENGTH)
        collectives = plan.collectives(BATCH_SIZE, LENGTH)
        seconds = time.perf_counter() - began
        found = {
            "backend": keras.config.backend(),
            "mesh": shape,
            "parameters": sum(math.prod(v.shape) for v in plan.variables),
            "split_share": plan.split_share,
            "seconds": round(seconds, 1),
            "peak_mib": peak_memory(),
            "memory": memory,
            "collectives": collectives,
        }
        print(json.dumps(found))


if __name__ == "__main__":
    main()
