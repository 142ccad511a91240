"""Damages files at random, and looks for a load that changes a value.

    KERAS_BACKEND=jax python integration_tests/fuzz_files.py \
        --what weights parts model backup plan --seed 1 --count 1000

Each file is loaded into a small model after one bit was flipped, or its end cut
off. The outcome is one of

- refused: a `ValueError` that names the file, and the model is unchanged,
- same: all values are those that were saved,
- changed, or another error: a defect. The command then ends with 1.

`fuzz_kills.py` beside it ends processes while they save.
"""

import argparse
import collections
import contextlib
import json
import pathlib
import random
import sys
import tempfile
import warnings

import keras
import numpy as np

from keras_tp import distribution

LAYOUTS = {"up/kernel": (None, "model"), "down/kernel": ("model", None)}
FEATURES = 6
# Bytes of a part: the model needs several.
PART_BYTES = 1000


def scope():
    """Returns the scope of a distribution over the devices there are."""
    layout_map = distribution.LayoutMap(mesh())
    layout_map.strict = True
    for pattern, axes in LAYOUTS.items():
        layout_map[pattern] = axes
    return distribution.ModelParallel(layout_map=layout_map).scope()


def mesh():
    # Not by the harness, whose import starts the runtime: see `fuzz_kills`.
    names = distribution.list_devices()
    names = names if keras.config.backend() == "torch" else names[:2]
    return distribution.DeviceMesh((1, len(names)), ["batch", "model"], names)


def structure():
    inputs = keras.Input((FEATURES,))
    x = keras.layers.Dense(8, "relu", name="up")(inputs)
    x = keras.layers.BatchNormalization(name="norm")(x)
    return keras.Model(inputs, keras.layers.Dense(4, name="down")(x))


def network():
    keras.utils.set_random_seed(1)
    model = structure()
    # The older format does not load the name of a loss.
    loss = keras.losses.MeanSquaredError()
    model.compile(keras.optimizers.Adam(0.01), loss)
    model.optimizer.build(model.trainable_variables)
    return model


def variables_of(model):
    return [*model.weights, *model.optimizer.variables]


def state_of(model):
    return [keras.ops.convert_to_numpy(v) for v in variables_of(model)]


def fill(model, seed):
    """Gives a model random values and returns them."""
    rng = np.random.default_rng(seed)
    for variable in variables_of(model):
        value = rng.integers(1, 9, variable.shape) + rng.random(variable.shape)
        variable.assign(value.astype(variable.dtype))
    return state_of(model)


def is_same(state, other):
    return len(state) == len(other) and all(
        a.shape == b.shape and a.tobytes() == b.tobytes()
        for a, b in zip(state, other)
    )


class Weights:
    """Files of `save_weights`."""

    name = "model.weights.h5"
    files = "*.h5"

    def __init__(self, folder):
        self.path = folder / self.name
        self.model = network()
        self.saved = fill(self.model, 1)
        self.save()
        self.other = fill(self.model, 2)

    def save(self):
        self.model.save_weights(self.path)

    def load(self):
        self.model.load_weights(self.path)

    def state(self):
        return state_of(self.model)

    def restore(self):
        for variable, value in zip(variables_of(self.model), self.other):
            variable.assign(value)


class Parts(Weights):
    """Files of `save_weights` with `max_shard_size`."""

    name = "model.weights.json"
    files = "*.*"

    def save(self):
        self.model.save_weights(self.path, max_shard_size=PART_BYTES / 2**30)


class WeightsOfModel(Weights):
    """Weights that are read from the file of a whole model."""

    name = "model.keras"
    files = "*.keras"

    def save(self):
        self.model.save(self.path)


class Model(WeightsOfModel):
    """Files of `save`, loaded by `keras.saving.load_model`."""

    def load(self):
        self.loaded = keras.saving.load_model(self.path)

    def state(self):
        return state_of(self.loaded) if self.loaded else self.other

    def restore(self):
        self.loaded = None

    loaded = None


class Legacy(Model):
    """Files of `save` in the older format, HDF5 only.

    Keras does not restore the optimizer of a functional model from them.
    """

    name = "model.h5"
    files = "*.h5"

    def __init__(self, folder):
        super().__init__(folder)
        count = len(self.model.weights)
        self.saved, self.other = self.saved[:count], self.other[:count]

    def state(self):
        return super().state()[: len(self.saved)]


class Folder(Model):
    """The folder of a model that is saved unpacked."""

    name = "."
    files = "*.*"

    def save(self):
        keras.saving.save_model(self.model, self.path, zipped=False)


class Backup(Weights):
    """The folder of `BackupAndRestore`; the epoch is a value too."""

    name = "latest.weights.h5"
    files = "*.*"

    def save(self):
        self.callback = keras.callbacks.BackupAndRestore(self.path.parent)
        self.callback.set_model(self.model)
        self.callback._current_epoch = 3
        self.callback._save_model()

    def load(self):
        self.callback.on_train_begin()

    def state(self):
        epoch = np.array(getattr(self.model, "_initial_epoch", None) or 0)
        return [*state_of(self.model), epoch]

    def restore(self):
        super().restore()
        self.model._initial_epoch = 0

    def __init__(self, folder):
        super().__init__(folder)
        self.saved = [*self.saved, np.array(3)]
        self.other = [*self.other, np.array(0)]


class Plan:
    """Files of `ShardingPlan.save`."""

    files = "*.json"

    def __init__(self, folder):
        self.path = folder / "plan.json"
        self.mesh = mesh()
        plan = distribution.plan_sharding(structure, self.mesh)
        plan.save(self.path)
        self.saved = [np.array(plan.to_json())]
        self.other = [np.array("")]
        self.plan = None

    def load(self):
        self.plan = distribution.ShardingPlan.load(self.path, self.mesh)

    def state(self):
        return [np.array(self.plan.to_json() if self.plan else "")]

    def restore(self):
        self.plan = None


FORMATS = {
    "weights": Weights,
    "parts": Parts,
    "weights_of_model": WeightsOfModel,
    "model": Model,
    "legacy": Legacy,
    "folder": Folder,
    "backup": Backup,
    "plan": Plan,
}


def damage(path, draw):
    """Flips a bit of a file, or truncates it; returns a description."""
    content = bytearray(path.read_bytes())
    place = draw.randrange(len(content))
    if draw.random() < 0.2:
        path.write_bytes(content[:place])
        return f"{path.name} cut off at {place}"
    bit = draw.randrange(8)
    content[place] ^= 1 << bit
    path.write_bytes(content)
    return f"bit {bit} of byte {place} of {path.name} flipped"


def search(kind, seed, count):
    """Damages the files of a format.

    Args:
        kind: String, a key of `FORMATS`.
        seed: Int.
        count: Int, how many times.

    Returns:
        A pair: a `Counter` of outcomes, and a list with a text for each
        defect.
    """
    outcomes, defects = collections.Counter(), []
    draw = random.Random(f"{kind} {seed}")
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        folder = pathlib.Path(folder)
        stack.enter_context(scope())
        files = folder / "files"
        files.mkdir()
        case = FORMATS[kind](files)
        names = sorted(path.name for path in files.glob(case.files))
        whole = {name: (files / name).read_bytes() for name in names}
        case.restore()
        case.load()
        assert is_same(case.state(), case.saved)
        for _ in range(count):
            case.restore()
            for name, content in whole.items():
                (files / name).write_bytes(content)
            done = damage(files / draw.choice(names), draw)
            outcome, text = _outcome(case)
            outcomes[outcome] += 1
            if outcome not in ("refused", "same"):
                defects.append(f"{done}: {outcome} {text}")
    return outcomes, defects


def _outcome(case):
    try:
        case.load()
    except ValueError as e:
        if str(case.path.parent) not in str(e):
            return "error without the file's name", repr(e)
        if not is_same(case.state(), case.other):
            return "a model changed by a refused file", repr(e)
        return "refused", ""
    except BaseException as e:
        if isinstance(e, KeyboardInterrupt):
            raise
        return f"raw {type(e).__name__}", repr(e)
    if is_same(case.state(), case.saved):
        return "same", ""
    return "changed", ""


def report(title, outcomes, defects):
    """Prints how a search ended; returns the number of defects."""
    title = f"{keras.config.backend()} {title}"
    print(f"{title}: {json.dumps(outcomes)}", flush=True)
    for text in defects[:20]:
        print(" ", text[:600], flush=True)
    return len(defects)


def main(argv):
    parser = argparse.ArgumentParser()
    parser.add_argument("--what", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=1000)
    arguments = parser.parse_args(argv)
    found = 0
    for kind in arguments.what:
        outcomes, defects = search(kind, arguments.seed, arguments.count)
        title = f"{kind} seed={arguments.seed} count={arguments.count}"
        found += report(title, outcomes, defects)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
