"""Measures memory, bytes and time of saving and loading a large model.

The model has `--layers` kernels of 32 MiB each, all split over the devices. A
process saves and loads it as a sharded checkpoint and as a `.weights.h5` file,
in turns. With `--models` it also saves and loads a `.keras` file, and makes new
models: with `load_model`, and with KerasHub's `from_preset` a Llama of about
the same size. Printed for each, of the process with the largest figure:

    peak   MiB by which the resident memory grew
    read   MiB that the process read from files with system calls (`rchar` of
           Linux, which does not count mapped memory)
    time   of the slowest process, in seconds, as median of `--rounds`

    python benchmarks/checkpoints.py --backend torch --devices 4
    python benchmarks/checkpoints.py --backend jax --devices 4 --processes 4

With `--preset`, KerasHub reads the kernels from the safetensors of Hugging
Face, where each is transposed.

With `--compare`, Keras's `OrbaxCheckpoint` takes turns with them, and the times
of the parts of `save_checkpoint` and `load_checkpoint` are printed:

    values    from the devices into the host's memory
    SHA-256   of all that is written or read
    write     into files, that is the cache of the system
    flush     to the disk
    read      from files, for the digests
    copy      from mapped files
    place     on the devices
    rest      the index, waiting for other processes, and what is not above
"""

import argparse
import collections
import functools
import gc
import hashlib
import json
import os
import pathlib
import shutil
import statistics
import tempfile
import time
import types

import relaunch

WIDTH = 4096
KERNEL_MIB = 32

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
add = parser.add_argument
add("--backend", choices=("jax", "tensorflow", "torch"), default="torch")
add("--devices", type=int, default=4)
add("--processes", type=int, help="all of one device by default")
add("--layers", type=int, default=64, help="kernels of 32 MiB")
add("--rounds", type=int, default=3)
add("--folder", help="where to write; removed afterwards")
add("--preset", action="store_true", help="safetensors of Hugging Face, too")
add("--models", action="store_true", help=".keras files, too")
add("--only", help="the name of one step, such as from_preset")
add("--compare", action="store_true", help="Orbax, too, and times of parts")
relaunch.add_argument(parser)
OPTIONS = parser.parse_args()
OPTIONS.processes = OPTIONS.processes or OPTIONS.devices
os.environ["KERAS_BACKEND"] = OPTIONS.backend
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["OMP_NUM_THREADS"] = "1"

relaunch.in_processes(OPTIONS)

import keras
import numpy as np

import keras_tp
from keras_tp.backend import distribution_lib as lib
from keras_tp.backend import load
from keras_tp.backend.saving import tensor_files

if OPTIONS.models:
    import keras_hub
if OPTIONS.preset:
    from keras_hub.src.utils.transformers import safetensor_utils

SAVED, LOADED = "save_checkpoint", "load_checkpoint"
# Parts of each, as the seconds of some functions less those of others in them.
PARTS = {
    SAVED: {
        "values": ("values",),
        "SHA-256": ("sha",),
        "write": ("file", "values", "sha", "file flush"),
        "flush": ("flush",),
    },
    LOADED: {
        "SHA-256": ("sha",),
        "read": ("digest", "sha"),
        "copy": ("copy",),
        "place": ("assign", "copy"),
    },
}
_spent = collections.Counter()


def build():
    """Returns a model of kernels of one size."""
    # Orbax compresses, so it is given values that are drawn at random.
    drawn = "random_uniform" if OPTIONS.compare else "ones"
    inputs = keras.Input((WIDTH,))
    x = inputs
    for index in range(OPTIONS.layers // 2):
        up = keras.layers.Dense(
            KERNEL_MIB * 2**18 // WIDTH,
            use_bias=False,
            kernel_initializer=drawn,
            name=f"up_{index}",
        )
        down = keras.layers.Dense(
            WIDTH,
            use_bias=False,
            kernel_initializer=drawn,
            name=f"down_{index}",
        )
        x = down(up(x))
    model = keras.Model(inputs, x)
    # `OrbaxCheckpoint` wants an optimizer. This one has no slots.
    model.compile("sgd", "mse")
    return model


def memory(key):
    """Returns a figure of /proc/self/status in MiB."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) / 2**10


def read_mib():
    """Returns the MiB that this process has read with system calls."""
    text = pathlib.Path("/proc/self/io").read_text()
    return int(text.split("rchar:")[1].split()[0]) / 2**20


def timed(name, function):
    """Returns a function whose seconds are added to those of a name."""

    @functools.wraps(function)
    def replacement(*args, **kwargs):
        start = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            _spent[name] += time.perf_counter() - start

    return replacement


class TimedHash:
    """A SHA-256 that notes its seconds."""

    def __init__(self, data=b""):
        self._digest = hashlib.sha256()
        self.update(data)

    def update(self, data):
        timed("sha", self._digest.update)(data)

    def hexdigest(self):
        return self._digest.hexdigest()


def time_parts():
    """Replaces functions of checkpoints by those that note their seconds."""
    write = tensor_files.write

    def write_timed(path, entries):
        entries = [(*rest, timed("values", read)) for *rest, read in entries]
        before = _spent["flush"]
        found = timed("file", write)(path, entries)
        _spent["file flush"] += _spent["flush"] - before
        return found

    tensor_files.write = write_timed
    tensor_files.hashlib = types.SimpleNamespace(sha256=TimedHash)
    os.fsync = timed("flush", os.fsync)
    file = tensor_files.TensorFile
    file.digest = timed("digest", file.digest)
    file.copy_to = timed("copy", file.copy_to)
    module = load("distribution_lib")
    module.assign_parts = timed("assign", module.assign_parts)


def parts_of(name):
    """Returns the seconds of the parts of what ran last."""
    found = {}
    for part, (whole, *less) in PARTS.get(name, {}).items():
        found[part] = _spent[whole] - sum(_spent[other] for other in less)
    return found


def orbax(folder, model):
    """Returns functions that save and load a model with Orbax."""
    callback = keras.callbacks.OrbaxCheckpoint(folder, save_on_background=False)
    callback.set_model(model)
    steps = iter(range(10**6))

    def save():
        callback._save_checkpoint(next(steps))
        callback.wait_until_finished()

    return {
        "OrbaxCheckpoint": save,
        "load_weights of Orbax": lambda: model.load_weights(folder),
    }


def hugging_face(folder, model):
    """Writes a preset of Hugging Face; returns a function that loads it."""
    if lib.process_id() == 0:
        os.makedirs(folder)
        tensor_files.write(
            f"{folder}/model.safetensors",
            [
                (
                    f"{layer.name}.weight",
                    layer.kernel.shape[::-1],
                    "float32",
                    lambda layer=layer: np.ones(layer.kernel.shape[::-1], "f"),
                )
                for layer in model.layers[1:]
            ],
        )
    lib.meet("The preset")

    def read():
        with safetensor_utils.SafetensorLoader(folder) as loader:
            for layer in model.layers[1:]:
                loader.port_weight(
                    keras_variable=layer.kernel,
                    hf_weight_key=f"{layer.name}.weight",
                    hook_fn=lambda value, shape: np.transpose(value),
                )

    return {"preset of Hugging Face": read}


def llama(folder, mesh):
    """Saves a Llama as a preset; returns a function that loads the preset."""
    # A backbone uses one of its two tables; the plan leaves the other whole.
    parallel = keras_tp.distribution.TensorParallel(mesh, strict=False)
    # A layer is 240 MiB.
    with parallel.scope():
        keras_hub.models.Llama3Backbone(
            vocabulary_size=2048,
            num_layers=max(1, OPTIONS.layers * KERNEL_MIB // 240),
            num_query_heads=16,
            num_key_value_heads=8,
            hidden_dim=2048,
            intermediate_dim=8192,
        ).save_to_preset(folder)

    def read():
        with parallel.scope():
            keras_hub.models.Llama3Backbone.from_preset(folder)

    return {"from_preset": read}


def made_of(path):
    """Makes a new model of a file, whose parts are in memory then."""
    model = keras.saving.load_model(path)
    assert model.layers[1].kernel._layout is not None


def measured(function):
    """Runs a function in all processes; returns the largest of its figures."""
    # Frees models that were made before.
    gc.collect()
    _spent.clear()
    lib.meet("A measurement")
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before, read, start = memory("VmRSS"), read_mib(), time.perf_counter()
    function()
    own = (
        memory("VmHWM") - before,
        read_mib() - read,
        time.perf_counter() - start,
    )
    gathered = load("processes").gather(list(own), "figures")
    return [max(values) for values in zip(*gathered)]


def main():
    """Prints the figures of both formats."""
    empty = memory("VmRSS")
    devices = keras_tp.distribution.list_devices()
    mesh = keras_tp.distribution.DeviceMesh(
        (1, len(devices)), ["batch", "model"], devices
    )
    layout_map = keras_tp.distribution.LayoutMap(mesh)
    layout_map["up_.*/kernel"] = (None, "model")
    layout_map["down_.*/kernel"] = ("model", None)
    parallel = keras_tp.distribution.ModelParallel(layout_map=layout_map)
    folder = lib.from_first_process(
        tempfile.mkdtemp(dir=OPTIONS.folder) if not lib.process_id() else None
    )
    sharded, whole = f"{folder}/model.safetensors", f"{folder}/model.weights.h5"
    checkpoints = keras_tp.distribution
    with parallel.scope():
        model = build()
        steps = {
            "save_checkpoint": lambda: checkpoints.save_checkpoint(
                sharded, model
            ),
            "load_checkpoint": lambda: checkpoints.load_checkpoint(
                sharded, model
            ),
            "save_weights": lambda: model.save_weights(whole),
            "load_weights": lambda: model.load_weights(whole),
        }
        if OPTIONS.models:
            archive = f"{folder}/model.keras"
            steps |= {
                "save .keras": lambda: model.save(archive),
                "load_weights .keras": lambda: model.load_weights(archive),
                "load_model checkpoint": lambda: made_of(sharded),
                "load_model .keras": lambda: made_of(archive),
                **llama(f"{folder}/llama", mesh),
            }
        if OPTIONS.preset:
            steps |= hugging_face(f"{folder}/preset", model)
        if OPTIONS.compare:
            steps |= orbax(f"{folder}/orbax", model)
            time_parts()
        if OPTIONS.only:
            steps = {OPTIONS.only: steps[OPTIONS.only]}
        found, parts = {name: [] for name in steps}, {SAVED: [], LOADED: []}
        for _ in range(OPTIONS.rounds):
            for name, step in steps.items():
                found[name].append(measured(step))
                if name in parts:
                    parts[name].append(parts_of(name))
    if lib.process_id() == 0:
        shutil.rmtree(folder)
        share = OPTIONS.layers * KERNEL_MIB / OPTIONS.processes
        print(
            f"{OPTIONS.backend}, {OPTIONS.devices} devices, "
            f"{OPTIONS.processes} processes: {share:.0f} MiB of "
            f"{OPTIONS.layers * KERNEL_MIB} in each; {empty:.0f} MiB before"
        )
        for name, rows in found.items():
            peaks, reads, times = zip(*rows)
            print(
                f"{name}: peak +{max(peaks):.0f} MiB, read "
                f"{max(reads):.0f} MiB, {statistics.median(times):.2f} s"
            )
        for name, rows in parts.items() if OPTIONS.compare else ():
            medians = {
                part: statistics.median(row[part] for row in rows)
                for part in PARTS[name]
            }
            total = statistics.median(row[-1] for row in found[name])
            medians["rest"] = total - sum(medians.values())
            text = ", ".join(f"{k} {v:.2f}" for k, v in medians.items())
            print(f"{name} in process 0: {text} s")
        print(json.dumps(found))


if __name__ == "__main__":
    main()
