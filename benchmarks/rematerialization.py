"""Measures how much memory `keras.RematScope` saves, split and on one device.

    pip install '.[jax,ahead]'
    python benchmarks/rematerialization.py --backend jax
    python benchmarks/rematerialization.py --backend torch
    python benchmarks/rematerialization.py --backend tensorflow

On JAX, the step is compiled for H100s, and XLA reports the temporaries of one
device. On torch and TensorFlow, each row is a run of its own on CPUs, and the
figure is the growth of a process's peak memory over two steps.
"""

import argparse
import contextlib
import json
import math
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent
PLAIN, SPLIT, SEQUENCE = "plain Keras", "tensor parallel", "and sequence"
MODES = ("none", "full", "list_of_layers", "larger_than", "activations")
# Batch size, length, hidden size, heads, dtype and number of devices.
SIZES = {
    "jax": (16, 2048, 1024, 16, "mixed_bfloat16", 4),
    "torch": (256, 64, 256, 4, "float32", 2),
    "tensorflow": (256, 64, 256, 4, "float32", 2),
}
VOCABULARY = 256
# On GPUs XLA moves matmuls beside collectives, and holds their operands until
# then. That hides what rematerialization saves.
SYNCHRONOUS = "allreduce,allgather,reducescatter"
NO_LATE_FREES = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
}


def build(options, mode):
    """Returns a compiled model of transformer blocks, each of them a layer."""
    import keras
    from keras import layers

    _, length, hidden, heads, dtype, _ = SIZES[options.backend]

    class Block(layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.norm_a = layers.LayerNormalization()
            self.attention = layers.MultiHeadAttention(heads, hidden // heads)
            self.norm_b = layers.LayerNormalization()
            self.up = layers.Dense(4 * hidden, "gelu", name="up")
            self.down = layers.Dense(hidden, name="down")

        def build(self, shape):
            self.norm_a.build(shape)
            self.attention.build(shape, shape)
            self.norm_b.build(shape)
            self.up.build(shape)
            self.down.build((*shape[:-1], 4 * hidden))

        def call(self, x):
            y = self.norm_a(x)
            x = x + self.attention(y, y)
            return x + self.down(self.up(self.norm_b(x)))

    keras.config.set_dtype_policy(dtype)
    keras.utils.set_random_seed(0)
    names = [f"block_{i}" for i in range(options.blocks)]
    arguments = {"mode": mode}
    if mode == "list_of_layers":
        arguments["layer_names"] = names
    is_on = mode != "none"
    scope = keras.RematScope(**arguments) if is_on else contextlib.nullcontext()
    with scope:
        inputs = keras.Input((length,), dtype="int32")
        x = layers.Embedding(VOCABULARY, hidden, name="tokens")(inputs)
        for name in names:
            x = Block(name=name)(x)
        model = keras.Model(inputs, layers.Dense(VOCABULARY, name="logits")(x))
    model.compile(
        keras.optimizers.SGD(0.01),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def compiled(options, way, mode):
    """Returns what XLA's compiler for H100 says of a step."""
    from keras_tp import distribution as dist

    batch_size, *_, count = SIZES[options.backend]
    if way == PLAIN:
        mesh = dist.DeviceMesh((1,), ["batch"], ["gpu:0"])
        distribution = dist.DataParallel(device_mesh=mesh)
    else:
        devices = [f"gpu:{i}" for i in range(count)]
        mesh = dist.DeviceMesh((1, count), ["batch", "model"], devices)
        distribution = dist.TensorParallel(
            mesh, sequence_parallel=way == SEQUENCE
        )
    report = dist.compile_for(
        lambda: build(options, mode),
        distribution,
        "h100",
        batch_size=batch_size,
    )
    return {
        "bytes": report.memory["temporaries"],
        "collectives": {
            kind: found["count"] for kind, found in report.collectives.items()
        },
    }


def status(name):
    """Returns a size of this process's memory from /proc, in bytes."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    raise KeyError(name)


def measured(options, way, mode):
    """Returns by how much two steps raise the peak of this process."""
    import numpy as np

    batch_size, length, *_, count = SIZES[options.backend]
    scope = contextlib.nullcontext()
    if way != PLAIN:
        from keras_tp import distribution as dist

        mesh = dist.DeviceMesh(
            (1, count), ["batch", "model"], dist.list_devices()[:count]
        )
        scope = dist.TensorParallel(
            mesh, sequence_parallel=way == SEQUENCE
        ).scope()
    with scope:
        model = build(options, mode)
        x = np.arange(batch_size * length).reshape(batch_size, length)
        x = (x % VOCABULARY).astype("int32")
        # The first step loads libraries.
        model.train_on_batch(x[:2], x[:2])
        before = status("VmRSS")
        # The peak is counted from here on.
        pathlib.Path("/proc/self/clear_refs").write_text("5")
        for _ in range(2):
            model.train_on_batch(x, x)
        found = {"bytes": status("VmHWM") - before}
        if way != PLAIN:
            counted = dist.count_collectives(model, x, x)
            found["collectives"] = {
                kind: number for kind, (number, _) in counted.items() if number
            }
    return found


def in_its_own_run(options, way, mode):
    """Returns what `measured` does, in a process or in one per device."""
    count = SIZES[options.backend][-1]
    command = [sys.executable]
    if way != PLAIN and options.backend == "torch":
        command += ["-m", "keras_tp.launch", "--devices", str(count)]
    command += [__file__, "--backend", options.backend, "--only", way, mode]
    command += ["--blocks", str(options.blocks)]
    environment = {
        **os.environ,
        **NO_LATE_FREES,
        # For the launcher, which imports Keras first.
        "KERAS_BACKEND": options.backend,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    if way != PLAIN and options.backend == "tensorflow":
        environment["KERAS_TP_CPU_DEVICES"] = str(count)
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=600
    )
    for line in result.stdout.splitlines():
        if line.startswith("{"):
            return json.loads(line)
    # Plain Keras raises in some modes.
    found = [one for one in result.stderr.splitlines() if "Error" in one]
    return {"error": found[-1][:80] if found else "no result"}


def main():
    """Prints a table, or the figures of one run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="jax", choices=SIZES)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--asynchronous", action="store_true")
    parser.add_argument("--json")
    parser.add_argument("--only", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ["KERAS_BACKEND"] = options.backend
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if options.only:
        found = measured(options, *options.only)
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps(found), flush=True)
        return
    run = in_its_own_run
    if options.backend == "jax":
        run = compiled
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        if not options.asynchronous:
            os.environ["XLA_FLAGS"] = (
                f"{os.environ.get('XLA_FLAGS', '')} "
                f"--xla_gpu_disable_async_collectives={SYNCHRONOUS}"
            )
    batch_size, length, hidden, _, dtype, _ = SIZES[options.backend]
    # One activation of the residual stream.
    item = 2 if dtype == "mixed_bfloat16" else 4
    unit = math.prod((batch_size, length, hidden, item))
    rows = []
    print("| way | mode | MiB | activations | times less | collectives |")
    print("|---|---|---|---|---|---|")
    for way in (PLAIN, SPLIT, SEQUENCE):
        for mode in options.modes.split(","):
            found = run(options, way, mode)
            rows.append({"way": way, "mode": mode, **found})
            cells = [way, mode, found.get("error", "")]
            if "bytes" in found:
                whole = [row for row in rows if row["way"] == way][0]
                cells[2:] = [
                    f"{found['bytes'] / 2**20:.0f}",
                    f"{found['bytes'] / unit:.1f}",
                    f"{whole['bytes'] / found['bytes']:.2f}",
                    ", ".join(
                        f"{number} {kind}"
                        for kind, number in found.get("collectives", {}).items()
                    ),
                ]
            print("| " + " | ".join(cells) + " |", flush=True)
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
