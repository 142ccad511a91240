"""Compares predicted collectives with counted ones, for KerasHub's backbones.

    KERAS_BACKEND=tensorflow python benchmarks/collectives_survey.py
    KERAS_BACKEND=jax python benchmarks/collectives_survey.py --target h100
    KERAS_BACKEND=torch python benchmarks/collectives_survey.py --devices 4 SAM
    KERAS_BACKEND=jax python benchmarks/collectives_survey.py --train

The models are the tiny ones of `plan_survey.py`, each in a process of its own.
`--target` compiles the step for an accelerator that is not there (JAX).
`--train` compares each model with the same one on one device instead, after 3
training steps: in float32, and in float64 if they differ by more than 1e-5.
Results are kept in `collectives_survey.json`, a line for each model. A run that
was stopped goes on with the other models; `--again` counts the named ones
again. `collectives.md` is written from it.
"""

import argparse
import collections
import datetime
import json
import multiprocessing
import os
import pathlib
import socket
import sys
import tempfile
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# torchrun's default. It is read when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

FOLDER = pathlib.Path(__file__).parent
RESULTS = "collectives_survey.json"
TABLE = "collectives.md"
KINDS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "collective_permute",
)
# In keys of rows with differences.
TRAINED = "trained"
STEPS = 3
# A larger difference may be rounding, which float64 tells from an error.
ROUNDING = 1e-5


def parse():
    """Returns the arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("names", nargs="*", help="models; all by default")
    add("--devices", type=int, default=2)
    add("--target", default="", help="an accelerator, such as h100 (JAX)")
    add("--train", action="store_true", help="compare with one device")
    add("--again", action="store_true", help="count models again")
    add("--timeout", type=int, default=300, help="seconds for each model")
    add("--folder", type=pathlib.Path, default=FOLDER, help="of the results")
    return parser.parse_args()


def key_of(arguments, backend, name):
    """Returns the key of a row of `collectives_survey.json`."""
    place = arguments.target or backend
    if arguments.train:
        place = f"{TRAINED} {place}"
    return f"{place}/{arguments.devices}/{name}"


# -- in the process of one model ----------------------------------------------


def mesh_of(count, target):
    """Returns a mesh for a count of devices; a target's need not exist."""
    from keras_tp import distribution

    devices = distribution.list_devices()[:count]
    if target:
        devices = [f"gpu:{i}" for i in range(count)]
    return distribution.DeviceMesh((1, count), ["batch", "model"], devices)


def outputs_of(model, x):
    """Returns the outputs of a model for a batch, as `KerasTensor`s."""
    import keras

    def described(array):
        return keras.KerasTensor(array.shape, "float32")

    batch = keras.tree.map_structure(
        lambda array: keras.KerasTensor(array.shape, array.dtype), x
    )
    if keras.config.backend() == "torch":
        # Keras runs models whole there, with other sizes too.
        return keras.tree.map_structure(described, model.predict_on_batch(x))
    outputs = model.compute_output_spec(batch)
    if any(None in leaf.shape for leaf in keras.tree.flatten(outputs)):
        # Some models lose a size on the way.
        outputs = model.predict_on_batch(x)
    return keras.tree.map_structure(described, outputs)


def counted(name, plan):
    """Runs a step of a model; returns its collectives and its outputs."""
    import keras
    import numpy as np

    from integration_tests import hub_backbones
    from keras_tp import distribution

    builders, specs, _ = hub_backbones.survey()
    with distribution.TensorParallel(plan=plan, strict=False).scope():
        model = builders[name]()
        hub_backbones.compile_model(model)
    x = hub_backbones.inputs_of(model, specs.get(name))
    outputs = outputs_of(model, x)
    targets = keras.tree.map_structure(lambda o: np.zeros(o.shape), outputs)
    found = distribution.count_collectives(model, x, targets)
    return {kind: list(pair) for kind, pair in found.items()}, outputs


def compiled(name, plan, target):
    """Compiles a step for a target; returns its collectives and outputs."""
    import keras

    from integration_tests import hub_backbones
    from integration_tests import hub_models
    from keras_tp import distribution

    builders, specs, _ = hub_backbones.survey()
    model = builders[name]()
    x = hub_backbones.inputs_of(model, specs.get(name))
    outputs = outputs_of(model, x)
    # Layers are numbered as in the plan.
    keras.utils.clear_session()

    def build():
        model = builders[name]()
        hub_backbones.compile_model(model)
        return model

    parallel = distribution.TensorParallel(plan=plan, strict=False)
    report = distribution.compile_for(
        build,
        parallel,
        target,
        batch_size=hub_backbones.BATCH,
        sequence_length=hub_models.LENGTH,
        input_spec=specs.get(name),
        target_spec=outputs,
    )
    found = {
        kind: [row["count"], row["bytes"]]
        for kind, row in report.collectives.items()
    }
    return found, outputs


def differences(name, devices, _):
    """Returns by how much a model differs from one device, by dtype."""
    import keras

    from integration_tests import hub_backbones

    mesh = mesh_of(devices, "")
    found = {"float32": hub_backbones.difference(name, mesh, STEPS)}
    if found["float32"] <= ROUNDING:
        return found
    found["moved"] = hub_backbones.moved_by_rounding(name, STEPS)
    if name in hub_backbones.NOT_IN_FLOAT64:
        return found
    if keras.config.backend() == "jax":
        import jax

        jax.config.update("jax_enable_x64", True)
    with hub_backbones.in_float64():
        found["float64"] = hub_backbones.difference(name, mesh, STEPS)
    return found


def child(name, devices, target, is_trained, out):
    """Writes the row of one model to a file."""
    row = (differences if is_trained else collectives)(name, devices, target)
    if os.environ.get("RANK", "0") == "0":
        pathlib.Path(out).write_text(json.dumps(row))


def collectives(name, devices, target):
    """Returns the predicted and the counted collectives of a model."""
    from integration_tests import hub_backbones

    plan = hub_backbones.plan_of(name, mesh_of(devices, target))
    found, outputs = (
        compiled(name, plan, target) if target else counted(name, plan)
    )
    return {
        "predicted": hub_backbones.predicted(plan, outputs),
        "counted": {kind: pair for kind, pair in found.items() if pair[0]},
        "flagged": sorted(set(hub_backbones.reasons(plan))),
    }


# -- in the process that starts them ------------------------------------------


def measure(arguments, backend, name, folder):
    """Returns the row of a model, from processes of its own."""
    out = pathlib.Path(folder) / "row.json"
    out.unlink(missing_ok=True)
    began = time.perf_counter()
    error = forked(arguments, backend, name, out)
    row = {"error": error[:300]}
    if out.exists():
        row = json.loads(out.read_text())
    row["seconds"] = round(time.perf_counter() - began)
    row["date"] = datetime.date.today().isoformat()
    return row


def forked(arguments, backend, name, out):
    """Runs a model in copies of this process; returns why it failed.

    A small model takes less time than the imports, which a copy has done.
    Nothing here has started the framework yet. On torch each device has a
    process of its own, with the variables that torchrun sets.
    """
    is_torch = backend == "torch"
    count = arguments.devices if is_torch else 1
    port = free_port()
    log = out.with_suffix(".log")

    def run(rank):
        if is_torch:
            os.environ.update(
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(count),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=port,
            )
        with open(f"{log}.{rank}", "w") as file:
            os.dup2(file.fileno(), 2)
            child(
                name,
                arguments.devices,
                arguments.target,
                arguments.train,
                out,
            )

    context = multiprocessing.get_context("fork")
    copies = [context.Process(target=run, args=(r,)) for r in range(count)]
    for process in copies:
        process.start()
    late = time.monotonic() + arguments.timeout
    for process in copies:
        process.join(max(late - time.monotonic(), 0))
    is_late = any(process.is_alive() for process in copies)
    for process in copies:
        process.kill()
        process.join()
    if is_late:
        return f"took more than {arguments.timeout} seconds"
    return last_line(pathlib.Path(f"{log}.0").read_text())


def free_port():
    """Returns a port of this host that nothing uses, as a string."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def last_line(text):
    """Returns the last line that says something."""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no result"


def read(folder):
    """Returns the rows that are there, by key."""
    path = folder / RESULTS
    return json.loads(path.read_text()) if path.exists() else {}


def write(folder, results):
    """Writes the rows, each on a line, and the table."""
    rows = [
        f"{json.dumps(key)}: {json.dumps(results[key])}"
        for key in sorted(results, key=str.lower)
    ]
    text = "{\n" + ",\n".join(rows) + "\n}\n"
    (folder / RESULTS).write_text(text)
    (folder / TABLE).write_text(table(results))


def verdict(row):
    """Returns how a row's predicted collectives compare with the counted.

    Of a row with differences, the words for them.
    """
    if "error" in row:
        return "not counted"
    if "float32" in row:
        return difference_of(row)
    if row["predicted"] == row["counted"]:
        return "equal"
    return "flagged" if row["flagged"] else "DIFFERS"


def table(results):
    """Returns the text of `collectives.md`."""
    places = collections.defaultdict(dict)
    trained = collections.defaultdict(dict)
    for key in sorted(results, key=str.lower):
        place, devices, name = key.split("/")
        if place.startswith(TRAINED):
            where = f"{place.removeprefix(TRAINED)}, {devices} devices".strip()
            trained[name][where] = results[key]
        else:
            places[place, devices][name] = results[key]
    dates = sorted({row["date"] for row in results.values()})
    text = [
        "# Predicted and counted collectives of KerasHub's models",
        "",
        "Written by `collectives_survey.py` on " + ", ".join(dates) + ".",
        "Collectives of one training step of tiny models, as count and bytes",
        "on one device, with the sum of the loss over a split output. A plan",
        "that does not predict all collectives says so itself; the last column",
        "has its reason. Programs for an accelerator are compiled without one.",
    ]
    for (place, devices), rows in places.items():
        found = collections.Counter(verdict(row) for row in rows.values())
        counts = ", ".join(f"{n} {what}" for what, n in sorted(found.items()))
        text += [
            "",
            f"## {place}, {devices} devices: {counts}",
            "",
            f"`{command_of(place, devices)}`",
            "",
            "| model | kind | predicted | counted | | flagged, why |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        for name, row in rows.items():
            text += lines_of(name, row)
    return "\n".join(text + trained_lines(trained)) + "\n"


def trained_lines(trained):
    """Returns the lines of the part about models that were trained.

    Args:
        trained: Dict of each model to its rows, by backend and devices.
    """
    places = sorted({place for rows in trained.values() for place in rows})
    if not places:
        return []
    lines = [
        "",
        "## Trained, against one device",
        "",
        f"The largest difference of an output after {STEPS} steps, as a part",
        "of its largest number, in float32. Above 1e-5, rounding grows in the",
        "model: the second number is the difference in float64, and the last",
        "how far the same model on one device moves if each of its weights",
        "changes by one unit in its last place. A value that crosses the kink",
        "of a ReLU moves more (ResNet). JAX computes the softmax of attention",
        "in float32 even then.",
        "",
        "`KERAS_BACKEND=jax python benchmarks/collectives_survey.py --train`",
        "",
        "| model | " + " | ".join(places) + " |",
        "| --- |" + " --- |" * len(places),
    ]
    for name, rows in trained.items():
        cells = [
            difference_of(rows[place]) if place in rows else ""
            for place in places
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def difference_of(row):
    """Returns the words for the differences of a model from one device."""
    if "error" in row:
        return row["error"].replace("|", "/")
    found = [row[dtype] for dtype in ("float32", "float64") if dtype in row]
    words = [f"{number:.0e}" for number in found]
    if "moved" in row:
        words.append(f"alone {row['moved']:.0e}")
    return "; ".join(words)


def command_of(place, devices):
    """Returns the command that counts the rows of a place."""
    is_backend = place in ("jax", "tensorflow", "torch")
    command = f"KERAS_BACKEND={place if is_backend else 'jax'} python "
    command += f"benchmarks/collectives_survey.py --devices {devices}"
    return command if is_backend else f"{command} --target {place}"


def lines_of(name, row):
    """Returns the lines of a model: one for each kind of collective."""
    if "error" in row:
        error = row["error"].replace("|", "/")
        return [f"| {name} | | | | not counted | {error} |"]
    lines = []
    for kind in KINDS:
        pairs = [row[of].get(kind) for of in ("predicted", "counted")]
        if any(pairs):
            cells = ["{}: {}".format(*pair) if pair else "" for pair in pairs]
            lines.append([name, kind.replace("_", "-"), *cells, "", ""])
    if not lines:
        lines = [[name, "none", "", "", "", ""]]
    reasons = dict.fromkeys(map(short, row["flagged"]))
    lines[0][-2:] = verdict(row), "; ".join(reasons)
    return ["| " + " | ".join(line) + " |" for line in lines]


def short(why):
    """Returns the part of a reason about what the plan does not predict."""
    parts = why.split("; ")
    return next((p for p in parts if "does not predict" in p), parts[0])


def main():
    """Counts the models that are not counted yet, one after the other."""
    arguments = parse()
    sys.path.insert(0, str(FOLDER.parent))
    for variable in "KERAS_TP_CPU_DEVICES", "JAX_NUM_CPU_DEVICES":
        os.environ.setdefault(variable, str(arguments.devices))
    from integration_tests import hub_backbones

    # Before the first model, so that none has to import it.
    hub_backbones.hub_models.models()
    backend = hub_backbones.keras.config.backend()
    known = list(hub_backbones.survey()[0])
    unknown = sorted(set(arguments.names) - set(known))
    if unknown:
        raise SystemExit(f"No model is called {unknown}; there are {known}")
    kept = arguments.folder
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.names or known:
            key = key_of(arguments, backend, name)
            if key in read(kept) and not arguments.again:
                continue
            reason = hub_backbones.NOT_TRAINED.get(name)
            row = {"error": reason, "date": str(datetime.date.today())}
            if reason is None:
                row = measure(arguments, backend, name, folder)
            write(kept, {**read(kept), key: row})
            print(key, verdict(row), row, flush=True)


if __name__ == "__main__":
    main()
