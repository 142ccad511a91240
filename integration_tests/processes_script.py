"""What `processes_test.py` runs, on four devices, in one process or several.

    python -m keras_tp.launch --devices 4 --processes 2 \
        integration_tests/processes_script.py FOLDER

One launch runs all checks, as starting processes takes seconds. Each process
writes what it found, a dict of arrays and texts by check, to a file of FOLDER.
"""

import json
import pathlib
import sys

import keras
import numpy as np
from keras import layers

import keras_tp
from keras_tp import backend
from keras_tp import distribution as dist
from keras_tp.backend import distribution_lib as lib

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from integration_tests import callbacks_test
from integration_tests import processes_meshes

FOLDER = pathlib.Path(sys.argv[1])
COUNT, INDEX = lib.num_processes(), lib.process_id()
ROWS, BATCH = 22, 8


def mesh_of(shape):
    return dist.DeviceMesh(shape, ["batch", "model"])


def distribute(shape, **kwargs):
    layout_map = dist.LayoutMap(mesh_of(shape))
    layout_map[".*up/kernel"] = (None, "model")
    layout_map[".*up/bias"] = ("model",)
    layout_map[".*down/kernel"] = ("model", None)
    dist.set_distribution(dist.ModelParallel(layout_map=layout_map, **kwargs))


def build(dropout=0.0, name="net"):
    return keras.Sequential(
        [
            layers.Input((16,)),
            layers.Dense(
                32, "relu", bias_initializer="random_normal", name="up"
            ),
            layers.Dropout(dropout),
            layers.Dense(12, bias_initializer="random_normal", name="down"),
        ],
        name=name,
    )


def compiled(optimizer="adam", **kwargs):
    keras.utils.set_random_seed(3)
    model = build(**kwargs)
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


def data(rows=ROWS, seed=5):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, 16)).astype("float32")
    return x, rng.standard_normal((rows, 12)).astype("float32")


def batches(x, y):
    for start in range(0, len(x), BATCH):
        yield x[start : start + BATCH], y[start : start + BATCH]


class Sequence(keras.utils.PyDataset):
    def __init__(self, pairs):
        super().__init__()
        self.pairs = list(pairs)

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, index):
        return self.pairs[index]


def history(model, *args, **kwargs):
    return model.fit(*args, verbose=0, **kwargs).history


def weights(model):
    return {v.path: keras.ops.convert_to_numpy(v) for v in model.weights}


def state(model):
    return weights(model) | {
        v.path: keras.ops.convert_to_numpy(v) for v in model.optimizer.variables
    }


def check_training(shape):
    """The last batch is partial; it is shuffled, validated, and saved."""
    distribute(shape)
    model = compiled(dropout=0.25)
    x, y = data()
    name = f"{shape[0]}x{shape[1]}"
    best = str(FOLDER / f"{name}_best.weights.h5")
    found = history(
        model,
        *(x, y),
        epochs=2,
        batch_size=BATCH,
        validation_data=data(14, seed=6),
        callbacks=[
            keras.callbacks.ModelCheckpoint(
                str(FOLDER / f"{name}_{{epoch}}.keras"), save_freq=2
            ),
            keras.callbacks.ModelCheckpoint(
                best,
                monitor="loss",
                save_best_only=True,
                save_weights_only=True,
            ),
        ],
    )
    found |= {
        "evaluate": model.evaluate(x, y, batch_size=BATCH, verbose=0),
        "predict": model.predict(x, batch_size=BATCH, verbose=0),
        "call": keras.ops.convert_to_numpy(model(x[:6])),
        "train_on_batch": model.train_on_batch(x[:6], y[:6]),
        "test_on_batch": model.test_on_batch(x[:6], y[:6]),
        "predict_on_batch": model.predict_on_batch(x[:6]),
    }
    path = FOLDER / f"{name}.keras"
    model.save(path)
    model.save_weights(FOLDER / f"{name}.weights.h5")
    model.save(FOLDER / f"{name}.h5")
    loaded = keras.models.load_model(path)
    other = build()
    other.load_weights(best)
    folder = FOLDER / f"{name}.safetensors"
    model.save(folder)
    for copy in (loaded, keras.models.load_model(folder)):
        for a, b in zip(weights(model).values(), copy.weights):
            np.testing.assert_array_equal(a, keras.ops.convert_to_numpy(b))
    found |= {f"best/{i}": v for i, v in enumerate(other.get_weights())}
    found |= state(model)
    if shape == (2, 2):
        exported = FOLDER / f"{name}_exported"
        model.export(exported, format="tf_saved_model", verbose=False)
        # Training goes on with the optimizer's state.
        found["more"] = history(loaded, x, y, batch_size=BATCH)["loss"]
    return found


def check_reports(shape):
    distribute(shape)
    model = compiled()
    x, y = data()
    counted = dist.count_collectives(model, x[:BATCH], y[:BATCH])
    report = dist.describe(model)
    assert sorted(report.device_bytes) == sorted(dist.list_devices())
    return {
        **{name: list(pair) for name, pair in counted.items()},
        "device_bytes": sorted(report.device_bytes.values()),
        "total": report.total_bytes,
        "split": report.split_bytes,
    }


def check_moving(shape):
    """A plain model is distributed, and brought back."""
    model = compiled()
    x, y = data()
    distribute(shape)
    dist.distribute_model(model)
    found = history(model, x, y, batch_size=BATCH)
    if keras.config.backend() == "tensorflow" and COUNT > 1:
        # DTensor has no mesh for one device of another process.
        return {**found, **weights(model)}
    first = dist.list_devices()[0]
    dist.distribute_model(model, dist.DataParallel(devices=[first]))
    own = weights(model)
    assert model.evaluate(x, y, verbose=0)[0] > 0
    return {**found, **own}


def check_kinds_of_data(shape):
    import tensorflow as tf

    distribute(shape)
    x, y = data()
    model = compiled()
    rows = tf.data.Dataset.from_tensor_slices((x, y))
    found = {
        "numpy": history(model, x, y, batch_size=BATCH, epochs=2),
        "generator": history(model, batches(x, y)),
        "dataset": history(model, Sequence(batches(x, y)), epochs=2),
        "tf.data": history(model, rows.batch(BATCH), epochs=2),
        "weighted": history(
            model,
            *(x, y),
            batch_size=BATCH,
            sample_weight=np.arange(ROWS) / ROWS,
        ),
    }
    return {
        f"{kind}/{name}": values
        for kind, logs in found.items()
        for name, values in logs.items()
    }


def check_own_parts(shape):
    """Each process loads its part of each batch only.

    The last batch has 4 rows, which the processes share evenly, or 3, or as
    many as the first process has.
    """
    parts = min(COUNT, shape[0])
    distribute(shape, auto_shard_dataset=parts == 1)
    own = dist.distribution().data_shard_id
    x, y = data(20)
    model = compiled()
    found = {}
    for last in (4, 3, 2):
        pairs = []
        for pair in batches(x[: 16 + last], y[: 16 + last]):
            if parts > 1 and last == 2 and len(pair[0]) < BATCH:
                # The other process has no more.
                pairs += [pair] if own == 0 else []
            else:
                pairs.append(
                    tuple(np.array_split(a, parts)[own % parts] for a in pair)
                )
        logs = history(model, Sequence(pairs), epochs=2, shuffle=False)
        found |= {f"{last}/{name}": values for name, values in logs.items()}
    # A part of a single batch.
    own_rows = np.array_split(x[:8], parts)[own % parts]
    found["predict_on_batch"] = model.predict_on_batch(own_rows)
    return {**found, **weights(model)}


def check_callbacks(shape):
    """Those that write files: all processes go on, and one writes."""
    distribute(shape)
    folder = FOLDER / "callbacks"
    folder.mkdir(exist_ok=True)
    found = callbacks_test.train_with_writers(folder)
    callbacks_test.check(found)
    return {name: found[name] for name in ("loss", "logged", "epochs")}


def check_errors(shape):
    """What processes hold that they should not: all of them are told."""
    distribute(shape)
    x, y = data()
    if COUNT == 1:
        return {}

    def error_of(function, *args, **kwargs):
        try:
            function(*args, **kwargs)
        except ValueError as e:
            return str(e)
        return "no error"

    found = {}
    model = compiled()
    # One process prints.
    model.fit(x, y, verbose=2)
    found["batches"] = error_of(history, model, x + INDEX, y)
    found["numbers"] = error_of(
        history, model, x[: 8 + 8 * INDEX], y[: 8 + 8 * INDEX], batch_size=8
    )
    found["values"] = error_of(model.layers[0].bias.assign, np.ones(32) + INDEX)
    different = keras.Sequential(
        [layers.Input((16,)), layers.Dense(12, name=f"only_{INDEX}")]
    )
    different.compile("sgd", "mse")
    found["models"] = error_of(history, different, x, y)
    half = dist.DeviceMesh((2,), ["model"], dist.list_devices()[:2])
    found["mesh"] = error_of(getattr, half, "backend_mesh")
    dist.set_distribution(None)
    keras_tp.uninstall()
    keras.utils.set_random_seed(INDEX)
    found["seeds"] = error_of(distribute, shape)
    keras.utils.set_random_seed(0)
    return found


def check_collectives(shape):
    """Of parts so large that gloo's sums of them were wrong."""
    distribute(shape)
    mesh = mesh_of(shape)
    x = np.arange(2 * 2**23, dtype="float32").reshape(2, -1) % 1000
    placed = dist.distribute_tensor(
        keras.ops.convert_to_tensor(x),
        dist.TensorLayout(("batch", None), mesh),
    )
    found = {}
    for name, want in {
        "reduce_scatter": x.sum(0).reshape(2, -1),
        "all_gather": np.stack([x.reshape(-1)] * 2),
    }.items():
        function = getattr(backend.communication, name)
        found[name] = 0
        # They were wrong now and then.
        for _ in range(5):
            result = function(placed, mesh, "batch")
            result = keras.ops.convert_to_numpy(result)
            found[name] = max(found[name], np.max(np.abs(result - want)))
    return found


def check_order(shape):
    """Nothing that processes do together is under way beside something else."""
    distribute(shape)
    callbacks = keras.callbacks.CallbackList(model=compiled())
    callbacks.on_train_begin()
    found = {"threads": str(callbacks._async_train or callbacks._async_test)}
    if keras.config.backend() == "jax":
        import jax

        x = dist.distribute_tensor(
            keras.ops.ones((1024, 1024)),
            dist.TensorLayout(("batch", "model"), mesh_of(shape)),
        )
        product = jax.jit(lambda x: x @ x @ x @ x)
        found["under way"] = str(
            not all(product(x).is_ready() for _ in range(4))
        )
    return found


CHECKS = {
    name.removeprefix("check_"): function
    for name, function in list(globals().items())
    if name.startswith("check_")
}
# Where one mesh says it all.
ONCE = dict.fromkeys(
    (
        *("callbacks", "collectives", "errors", "kinds_of_data", "moving"),
        *("order", "reports"),
    ),
    (2, 2),
)


def main():
    found = {}
    wanted = sys.argv[2:] or CHECKS
    for shape in processes_meshes.SHAPES:
        for name in wanted:
            if ONCE.get(name, shape) != shape:
                continue
            if name == "own_parts" and shape[0] == 1:
                # There is one part only.
                continue
            keras.utils.clear_session()
            results = CHECKS[name](shape)
            dist.set_distribution(None)
            found[f"{name}/{shape[0]}x{shape[1]}"] = {
                key: value
                if isinstance(value, str)
                else np.asarray(value).tolist()
                for key, value in results.items()
            }
    path = FOLDER / f"{INDEX}_of_{COUNT}.json"
    path.write_text(json.dumps(found))


main()
