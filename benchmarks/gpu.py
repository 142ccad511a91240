"""Compares keras_tp with plain Keras on one CUDA device.

    python benchmarks/gpu.py --json gpu.json      # seven minutes on an H100
    python benchmarks/gpu.py --parts forecast --backends jax    # without one

A Llama of KerasHub is trained on JAX and on torch (nccl, one rank), under
`TensorParallel` and in plain Keras, from the same weights: losses, step times
in turns, peak memory beside the forecasts of the plan and of `compile_for`, the
kernel of the attention, and the recipes of `gpu_features.py`. On one device
nothing is split or sent, so the times show the cost of the hooks.

Each part is a process of its own, so that its peak memory is its own.
"""

import argparse
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import tempfile
import time

BACKENDS = ("jax", "torch")
SIDES = ("keras", "keras_tp")
PARTS = (
    "features",
    "losses",
    "memory-keras",
    "memory-keras_tp",
    "time",
)
SIZES = {
    "vocabulary": 32000,
    "layers": 8,
    "heads": 16,
    "hidden": 1024,
    "intermediate": 2816,
    "sequence": 1024,
    "batch": 8,
}
TINY = {
    "vocabulary": 128,
    "layers": 2,
    "heads": 4,
    "hidden": 64,
    "intermediate": 128,
    "sequence": 32,
    "batch": 2,
}


def parse_options():
    """Returns the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--backends", default=",".join(BACKENDS))
    add("--parts", default=",".join(PARTS))
    add("--rounds", type=int, default=12, help="turns of each side")
    add("--steps", type=int, default=20, help="train steps in a turn")
    add("--jit", action="store_true", help="torch: `jit_compile=True` too")
    add("--tiny", action="store_true", help="a tiny model, to try the script")
    add("--limit", type=int, default=240, help="seconds that a part may take")
    add("--json", metavar="FILE", help="where to write all figures")
    add("--part", help=argparse.SUPPRESS)
    add("--result", help=argparse.SUPPRESS)
    return parser.parse_args()


OPTIONS = parse_options()
SIZE = TINY if OPTIONS.tiny else SIZES


def run_parts(options):
    """Runs every part in a process of its own, and returns their results."""
    results = {}
    for backend in options.backends.split(","):
        for part in options.parts.split(","):
            if part == "forecast" and backend != "jax":
                continue
            start = time.perf_counter()
            results[f"{backend} {part}"] = result = run_part(backend, part)
            result["seconds"] = round(time.perf_counter() - start, 1)
            print(f"{backend} {part}: {json.dumps(result)[-1500:]}", flush=True)
            if options.json:
                write(options.json, results)
    return results


def run_part(backend, part):
    """Returns the result of one part, or its error."""
    environment = {**os.environ, "KERAS_BACKEND": backend}
    environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if part == "forecast":
        environment["JAX_PLATFORMS"] = "cpu"
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "result.json")
        command = [sys.executable, os.path.abspath(__file__), *sys.argv[1:]]
        command += ["--part", part, "--result", str(file)]
        try:
            done = subprocess.run(
                command,
                env=environment,
                timeout=OPTIONS.limit,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        except subprocess.TimeoutExpired:
            return {"error": f"took longer than {OPTIONS.limit} seconds"}
        if file.exists():
            return json.loads(file.read_text())
        return {"error": done.stdout[-3000:]}


def write(path, results):
    """Writes the results, with the machine that they are from."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total"]
    try:
        card = subprocess.check_output(
            [*query, "--format=csv,noheader"], text=True
        ).strip()
    except (OSError, subprocess.CalledProcessError):
        card = None
    content = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "card": card,
        "command": " ".join(["python benchmarks/gpu.py", *sys.argv[1:]]),
        "model": SIZE,
        "results": results,
    }
    pathlib.Path(path).write_text(json.dumps(content, indent=2) + "\n")


if OPTIONS.part is None:
    run_parts(OPTIONS)
    sys.exit()

import contextlib

import keras
import keras_hub
import numpy as np
from intervals import ratio_interval

import keras_tp
from keras_tp import distribution

if keras.backend.backend() == "torch":
    import torch
else:
    import jax


def on_cuda():
    """Returns whether the backend computes on a CUDA device."""
    if keras.backend.backend() == "torch":
        return torch.cuda.is_available()
    return jax.default_backend() == "gpu"


def enter(side):
    """Makes a side the one whose models are built and trained."""
    if side == "keras_tp":
        # Installs the hooks too.
        distribution.set_distribution(own_distribution())
    else:
        distribution.set_distribution(None)
        keras_tp.uninstall()


_DISTRIBUTIONS = []


def own_distribution():
    """Returns `TensorParallel` over one device, always the same one."""
    if not _DISTRIBUTIONS:
        devices = distribution.list_devices()[:1]
        mesh = distribution.DeviceMesh((1, 1), ["batch", "model"], devices)
        _DISTRIBUTIONS.append(distribution.TensorParallel(mesh))
    return _DISTRIBUTIONS[0]


def build(dtype="mixed_bfloat16", jit_compile="auto"):
    """Returns a compiled Llama, with the same weights each time."""
    keras.utils.set_random_seed(0)
    backbone = keras_hub.models.LlamaBackbone(
        vocabulary_size=SIZE["vocabulary"],
        num_layers=SIZE["layers"],
        num_query_heads=SIZE["heads"],
        num_key_value_heads=SIZE["heads"],
        hidden_dim=SIZE["hidden"],
        intermediate_dim=SIZE["intermediate"],
        dtype=dtype,
    )
    task = keras_hub.models.LlamaCausalLM(
        backbone=backbone, preprocessor=None, dtype=dtype
    )
    # `fit` of a task prepares its data with TensorFlow or grain.
    model = keras.Model(task.inputs, task.outputs)
    model.compile(
        keras.optimizers.Adam(1e-4),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=jit_compile,
    )
    return model


def make_batches(count):
    """Returns the inputs and targets of `count` batches."""
    rng = np.random.default_rng(0)
    shape = (count * SIZE["batch"], SIZE["sequence"])
    tokens = rng.integers(SIZE["vocabulary"], size=shape).astype("int32")
    inputs = {"token_ids": tokens, "padding_mask": np.ones_like(tokens)}
    return inputs, np.roll(tokens, -1, axis=1)


def train(model, batches):
    """Trains one epoch, and returns its mean loss."""
    history = model.fit(
        *batches, batch_size=SIZE["batch"], shuffle=False, verbose=0
    )
    return history.history["loss"][0]


def measure_time():
    """Has the sides take turns at the same steps, and counts the others."""
    names = {side: (side, "auto") for side in SIDES}
    if keras.backend.backend() == "torch":
        names = {side: (side, False) for side in SIDES}
        if OPTIONS.jit:
            names.update({f"{side} jit": (side, True) for side in SIDES})
    batches = make_batches(OPTIONS.steps)
    models, times, losses, first = {}, {}, {}, {}
    for name, (side, jit_compile) in names.items():
        enter(side)
        models[name] = build(jit_compile=jit_compile)
    for index in range(OPTIONS.rounds + 1):
        for name, (side, _) in names.items():
            enter(side)
            start = time.perf_counter()
            loss = train(models[name], batches)
            seconds = time.perf_counter() - start
            losses.setdefault(name, []).append(loss)
            if index:
                times.setdefault(name, []).append(seconds / OPTIONS.steps)
            else:
                first[name] = round(seconds, 2)
    result = {
        "median_ms": {n: 1000 * float(np.median(t)) for n, t in times.items()},
        "first_turn_s": first,
        "losses": losses,
        "step_seconds": times,
        "ratios": {},
    }
    for suffix in ("", " jit"):
        a, b = (f"{side}{suffix}" for side in reversed(SIDES))
        if a in times:
            result["ratios"][f"{a} / {b}"] = {
                "ratio": float(np.median(times[a]) / np.median(times[b])),
                "interval": ratio_interval(times[a], times[b]),
            }
    enter("keras_tp")
    result["attention"] = attention_kernels(models["keras_tp"])
    return result


def attention_kernels(model):
    """Returns the names of the kernels that attention ran in a train step."""
    batches = make_batches(1)
    if keras.backend.backend() == "torch":
        activities = [torch.profiler.ProfilerActivity.CPU]
        if on_cuda():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as profile:
            train(model, batches)
        names = {event.key for event in profile.key_averages()}
        words = ("flash", "fmha", "attention", "sdpa", "cutlass", "softmax")
        return sorted(
            name[:100]
            for name in names
            if any(word in name.lower() for word in words)
        )
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            train(model, batches)
        traces = pathlib.Path(folder).rglob("*.xplane.pb")
        text = b"".join(file.read_bytes() for file in traces)
    found = re.findall(rb"\w*(?:flash|fmha|dot_product_attention)\w*", text)
    return sorted({name.decode()[:100] for name in found})[:12]


def measure_memory(side):
    """Trains a few steps, and returns the peak of the device's memory."""
    enter(side)
    forecast = None
    model = build(jit_compile=False if _is_torch() else "auto")
    train(model, make_batches(3))
    if _is_torch():
        peak = torch.cuda.max_memory_allocated() if on_cuda() else None
    else:
        statistics = jax.devices()[0].memory_stats() or {}
        peak = statistics.get("peak_bytes_in_use")
    if side == "keras_tp":
        mesh = own_distribution().device_mesh
        plan = distribution.plan_sharding(model, mesh)
        forecast = plan.memory(SIZE["batch"], SIZE["sequence"])
    return {"peak_bytes": peak, "plan": forecast}


def _is_torch():
    return keras.backend.backend() == "torch"


def compare_losses():
    """Trains both sides in float32, and compares their losses and weights."""
    batches = make_batches(1)
    losses, weights = {}, {}
    for side in SIDES:
        enter(side)
        model = build("float32", jit_compile=False if _is_torch() else "auto")
        losses[side] = [train(model, batches) for _ in range(10)]
        weights[side] = model.get_weights()
    a, b = (np.array(losses[side]) for side in SIDES)
    moved = max(
        float(np.abs(x - y).max() / np.abs(x).max())
        for x, y in zip(*(weights[side] for side in SIDES))
    )
    return {
        "losses": losses,
        "largest_relative_difference": float(np.abs(a / b - 1).max()),
        "weights": moved,
    }


def compare_features():
    """Returns how far each feature's numbers are from plain Keras's."""
    import gpu_features

    found = {}
    for name, feature in gpu_features.FEATURES.items():
        results = {}
        for side in SIDES:
            enter(side)
            try:
                numbers = np.array(feature(), "float64")
            except Exception as error:
                numbers = f"{type(error).__name__}: {error}"[:600]
            results[side] = numbers
        a, b = results.values()
        if isinstance(a, str) or isinstance(b, str):
            a, b = (x if isinstance(x, str) else "ran" for x in (a, b))
            found[name] = {"keras": a, "keras_tp": b}
        else:
            off = np.abs(a - b).max() / np.abs(a).max()
            found[name] = float(off)
    return found


def forecast():
    """Compiles the step for an H100 without one; returns its memory."""
    report = distribution.compile_for(
        build,
        None,
        "h100",
        count=1,
        batch_size=SIZE["batch"],
        sequence_length=SIZE["sequence"],
        optimizer="adam",
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return report.to_dict()


def main():
    """Measures one part, and writes its result."""
    part = OPTIONS.part
    if part == "time":
        result = measure_time()
    elif part.startswith("memory-"):
        result = measure_memory(part.removeprefix("memory-"))
    elif part == "losses":
        result = compare_losses()
    elif part == "features":
        result = compare_features()
    else:
        result = forecast()
    result["keras_tp"] = keras_tp.__version__
    result["keras"] = keras.__version__
    result["on_cuda"] = on_cuda()
    with contextlib.suppress(NameError):
        result["torch"] = torch.__version__
    with contextlib.suppress(NameError):
        result["jax"] = jax.__version__
    pathlib.Path(OPTIONS.result).write_text(json.dumps(result, default=float))


if __name__ == "__main__":
    main()
