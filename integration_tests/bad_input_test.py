"""Each row of the bad-input table gives its error or warning, and its text."""

import os
import pathlib
import subprocess
import sys
import warnings

import keras
import numpy as np
import pytest
from keras import layers

import keras_tp
from integration_tests import harness
from keras_tp import distribution as dist
from keras_tp.distribution import device_mesh

ROOT = pathlib.Path(__file__).parent.parent


def mesh(shape=(1, 2)):
    return harness.mesh(harness.fitted(shape))


def model_parallel(patterns, shape=(1, 2), strict=False):
    layout_map = dist.LayoutMap(mesh(shape))
    for pattern, axes in patterns.items():
        layout_map[pattern] = axes
    layout_map.strict = strict
    return dist.ModelParallel(layout_map=layout_map)


def mlp(hidden=12, name="net"):
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(hidden, name="up"),
            layers.Dense(4, name="down"),
        ],
        name=name,
    )


GOOD = {".*up/kernel": (None, "model"), ".*down/kernel": ("model", None)}


def caught(call):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    # Keras on torch has numpy deprecate a call of its own.
    return [
        str(w.message)
        for w in found
        if not issubclass(w.category, DeprecationWarning)
    ]


# --- pattern matches no variable --------------------------------------------


def first_use(model, use):
    x, y = np.zeros((4, 6), "float32"), np.zeros((4, 4), "float32")
    if use == "compile":
        model.compile("sgd", "mse")
    elif use == "call":
        model(x)
    else:
        model.compile("sgd", "mse", run_eagerly=False)
        model.fit(x, y, verbose=0)


@pytest.mark.parametrize("use", ["compile", "call", "fit"])
def test_dead_pattern_warns_once_with_nearest_paths(use):
    with model_parallel({**GOOD, "net/upp/kernel": (None, "model")}).scope():
        model = mlp()
        messages = caught(lambda: first_use(model, use))
        again = caught(lambda: first_use(model, "call"))
    dead = [m for m in messages if "'net/upp/kernel'" in m]
    assert len(dead) == 1, messages
    assert "matches no variable" in dead[0]
    assert "'net/up/kernel'" in dead[0]
    assert not [m for m in again if "upp" in m]


@pytest.mark.parametrize("pattern", ["kernel", ".*kern", "kern.*"])
def test_substring_pattern_is_told_that_the_whole_path_has_to_match(pattern):
    with model_parallel({pattern: (None, "model")}).scope():
        model = mlp()
        (message,) = caught(lambda: model.compile("sgd", "mse"))
    assert "the whole path has to match" in message
    assert f"'.*{pattern.strip('.*')}.*' would match" in message


def test_dead_pattern_is_an_error_in_strict_mode():
    distribution = model_parallel(
        {**GOOD, "net/upp/kernel": (None, "model")}, strict=True
    )
    with distribution.scope():
        model = mlp()
        with pytest.raises(ValueError, match="'net/upp/kernel'.*net/up/kernel"):
            model.compile("sgd", "mse")


def test_dead_pattern_of_a_model_that_fit_builds():
    with model_parallel({**GOOD, "nothing": (None,)}).scope():
        model = keras.Sequential(
            [layers.Dense(12, name="up"), layers.Dense(4, name="down")]
        )
        messages = caught(lambda: first_use(model, "fit"))
    assert [m for m in messages if "'nothing'" in m], messages


def test_patterns_of_outputs_and_random_state_are_not_dead():
    patterns = {
        **GOOD,
        ".*up/output": ("batch", None),
        ".*seed_generator_state": (None,),
    }
    with model_parallel(patterns, strict=True).scope():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                layers.Dense(12, name="up"),
                layers.Dropout(0.5),
                layers.Dense(4, name="down"),
            ]
        )
        assert caught(lambda: first_use(model, "fit")) == []


def test_slots_take_their_variables_layout_whatever_matches_them():
    with model_parallel({".*kernel.*": (None, "model")}).scope():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(8)])
        model.compile(keras.optimizers.Adafactor(0.1), "mse")
        model.fit(np.zeros((4, 6)), np.zeros((4, 8)), verbose=0)
    slots = [r for r in dist.describe(model).rows if r.role == "slot"]
    assert {r.axes for r in slots if r.shape == (6, 8)} == {(None, "model")}


# --- path whose outer model name changed ------------------------------------


def test_renamed_model_keeps_its_layouts_with_a_warning():
    patterns = {
        "sequential/up/kernel": (None, "model"),
        "sequential/down/kernel": ("model", None),
    }
    with model_parallel(patterns).scope():
        first = mlp(name=None)
        messages = caught(lambda: mlp(name=None))
        second = mlp(name=None)
    assert first.layers[0].kernel.path == "sequential/up/kernel"
    assert second.layers[0].kernel.path == "sequential_2/up/kernel"
    assert any(
        "'sequential_1/up/kernel'" in m and "'sequential/up/kernel'" in m
        for m in messages
    ), messages
    for model in (first, second):
        split = [r.path for r in dist.describe(model).rows if r.is_split]
        assert split == [layer.kernel.path for layer in model.layers]


def test_prefix_lost_by_load_model_keeps_its_layouts(tmp_path):
    distribution = model_parallel(
        {"net/up/kernel": (None, "model"), "net/down/kernel": ("model", None)}
    )
    path = tmp_path / "model.keras"
    with distribution.scope():
        mlp().save(path)
        loaded = []
        messages = caught(lambda: loaded.append(keras.models.load_model(path)))
    (model,) = loaded
    paths = [v.path for v in model.variables if "kernel" in v.path]
    assert paths == ["up/kernel", "down/kernel"]
    assert any("'up/kernel'" in m and "'net/up/kernel'" in m for m in messages)
    split = [r.path for r in dist.describe(model).rows if r.is_split]
    assert split == paths


def test_the_full_path_comes_first():
    patterns = {
        "other/down/kernel": (None, "model"),
        "net/down/kernel": ("model", None),
        ".*up/kernel": (None, "model"),
    }
    with model_parallel(patterns).scope():
        model = mlp()
    assert dist.describe(model)["net/down/kernel"].axes == ("model", None)


def test_a_layer_of_another_name_is_not_taken_for_a_renamed_model():
    with model_parallel({"block_1/kernel": (None, "model")}).scope():
        inputs = keras.Input((6,))
        h = layers.Dense(12, name="block_0")(inputs)
        model = keras.Model(inputs, layers.Dense(4, name="block_1")(h))
    split = [r.path for r in dist.describe(model).rows if r.is_split]
    assert split == ["block_1/kernel"]


# --- large variable left replicated -----------------------------------------


def test_large_unmatched_variable_is_named_with_its_bytes():
    with model_parallel({".*down/kernel": ("model", None)}).scope():
        model = mlp(hidden=2**16)
        (message,) = caught(lambda: model.compile("sgd", "mse"))
    assert "'net/up/kernel' of shape (6, 65536), 1.50 MiB" in message
    assert "match no pattern" in message


def test_large_unmatched_variable_is_an_error_in_strict_mode_unless_allowed():
    with model_parallel(
        {".*down/kernel": ("model", None)}, strict=True
    ).scope():
        model = mlp(hidden=2**16)
        with pytest.raises(ValueError, match="net/up/kernel"):
            model.compile("sgd", "mse")
    allowed = {".*down/kernel": ("model", None), ".*up/kernel": (None, None)}
    with model_parallel(allowed, strict=True).scope():
        mlp(hidden=2**16).compile("sgd", "mse")


# --- layouts that cannot hold their variable --------------------------------


def test_two_patterns_for_one_path():
    patterns = {".*up/kernel": (None, "model"), ".*kernel": ("model", None)}
    with model_parallel(patterns).scope():
        with pytest.raises(ValueError) as e:
            mlp()
    for text in ("net/up/kernel", ".*up/kernel", "'.*kernel'"):
        assert text in str(e.value)


@pytest.mark.parametrize("axes", [("model",), (None, None, "model")])
def test_layout_of_the_wrong_rank(axes):
    with model_parallel({".*up/kernel": axes}).scope():
        with pytest.raises(ValueError) as e:
            mlp()
    for text in ("'net/up/kernel'", "(6, 12)", str(axes)):
        assert text in str(e.value)


def test_dim_that_the_mesh_axis_does_not_divide():
    distribution = model_parallel({".*up/kernel": (None, "model")}, (1, 4))
    size = distribution.device_mesh.shape[1]
    with distribution.scope():
        with pytest.raises(ValueError) as e:
            mlp(hidden=15)
    message = str(e.value)
    for text in (
        "Dim 1",
        "'net/up/kernel'",
        "(6, 15)",
        "size 15",
        f"'model' of size {size}",
        "1, 3, 5, 15",
        {4: "12, 16", 2: "14, 16"}[size],
    ):
        assert text in message, (text, message)


def test_dim_that_the_product_of_two_axes_does_not_divide():
    patterns = {".*up/kernel": (("batch", "model"), None)}
    layout_map = dist.LayoutMap(harness.mesh((2, 2)))
    for pattern, axes in patterns.items():
        layout_map[pattern] = axes
    with dist.ModelParallel(layout_map=layout_map).scope():
        with pytest.raises(ValueError) as e:
            mlp()
    for text in ("Dim 0", "size 6", "('batch', 'model') of size 4", "4, 8"):
        assert text in str(e.value)


@pytest.mark.parametrize(
    "axes", [("model", "model"), (("model", "batch"), "model")]
)
def test_same_mesh_axis_twice(axes):
    with pytest.raises(ValueError, match="Repeated.*model.*Received"):
        dist.LayoutMap(mesh())[".*"] = axes


@pytest.mark.parametrize("axes", [("modle", None), (("batch", "modle"), None)])
def test_unknown_axis(axes):
    with pytest.raises(ValueError) as e:
        dist.LayoutMap(mesh())[".*"] = axes
    for text in ("Invalid axis names for Layout", "modle", "batch", "model"):
        assert text in str(e.value)


def test_key_that_is_no_regular_expression():
    with pytest.raises(ValueError, match="regular expression"):
        dist.LayoutMap(mesh())["(up/kernel"] = (None, "model")


# --- meshes -----------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 3), (2, 16)])
def test_mesh_that_does_not_fit_the_listed_devices(shape):
    count = int(np.prod(shape))
    with pytest.raises(ValueError) as e:
        dist.DeviceMesh(shape, ["batch", "model"], ["cpu:0", "cpu:1"])
    assert f"has {count} devices, and 2 are listed" in str(e.value)


@pytest.mark.parametrize("factor", [1, 4])
def test_mesh_that_does_not_fit_the_devices_there_are(factor):
    available = dist.get_device_count()
    shape = (factor, available // 2)
    with pytest.raises(ValueError) as e:
        dist.DeviceMesh(shape, ["batch", "model"])
    assert f"has {np.prod(shape)} devices, and {available} are available" in (
        str(e.value)
    )


def named_mesh(shape=(1, 8), kind="tpu", axis_names=("batch", "model")):
    """Returns a mesh of devices that need not be here."""
    devices = [f"{kind}:{index}" for index in range(int(np.prod(shape)))]
    return dist.DeviceMesh(shape, list(axis_names), devices)


def uses_of_a_mesh(mesh):
    """Yields every way to have something placed on a mesh."""
    plan = dist.plan_sharding(mlp, mesh)
    layout = dist.TensorLayout((None, "model"), mesh)
    split = dist.TensorParallel(mesh)
    model = mlp()
    yield lambda: dist.set_distribution(split)
    yield lambda: dist.set_distribution(dist.DataParallel(mesh))
    yield lambda: split.scope().__enter__()
    yield lambda: plan.distribution().scope().__enter__()
    yield lambda: keras.distribution.set_distribution(split)
    yield lambda: dist.distribute_model(model, split)
    yield lambda: dist.verify(mlp, split, np.zeros((2, 6)), np.zeros((2, 4)))
    yield lambda: dist.distribute_tensor(np.zeros((6, 8), "float32"), layout)
    yield lambda: mesh.backend_mesh


@pytest.mark.filterwarnings("ignore:Expect the input mesh to be 1D")
def test_unknown_device():
    names = ["cpu:0", "cpu:99"]
    mesh = dist.DeviceMesh((1, 2), ["batch", "model"], names)
    for use in uses_of_a_mesh(mesh):
        with pytest.raises(ValueError) as e:
            use()
        for text in ("Unknown device 'cpu:99'", "'cpu:0'", "--devices 100"):
            assert text in str(e.value)
        assert f"Received: devices={names}" in str(e.value)
        assert dist.distribution() is None


@pytest.mark.filterwarnings("ignore:Expect the input mesh to be 1D")
def test_devices_of_a_type_that_is_not_here():
    for use in uses_of_a_mesh(named_mesh()):
        with pytest.raises(ValueError) as e:
            use()
        for text in ("Unknown device 'tpu:0'", "no devices of type 'tpu'"):
            assert text in str(e.value)
        assert dist.distribution() is None
    assert all(v._layout is None for v in mlp().variables)


def test_a_plan_for_devices_that_are_not_here():
    plan = dist.plan_sharding(mlp, named_mesh((2, 4)))
    assert plan["net/up/kernel"].axes == (None, "model")
    assert plan.memory(8)["parameters"] == 4 * (6 * 12 + 12 + 12 * 4) // 4 + 16
    assert plan.collectives(8)["all_reduce"][0] > 1
    assert "each device holds" in plan.summary()
    read = dist.ShardingPlan.from_json(plan.to_json())
    assert read.diff(plan) == {}
    assert read.device_mesh.devices.shape == (2, 4)
    assert plan.distribution().device_mesh is plan.device_mesh


def test_unknown_type_of_device():
    with pytest.raises(ValueError, match="'abacus'"):
        dist.DeviceMesh((1, 1), ["batch", "model"], ["abacus:0"])
    with pytest.raises(ValueError, match="'abacus'"):
        dist.list_devices("abacus")


def test_duplicated_device():
    with pytest.raises(ValueError, match="only once.*'cpu:0'"):
        dist.DeviceMesh((1, 2), ["batch", "model"], ["cpu:0", "cpu:0"])


@pytest.mark.parametrize(
    "arguments, text",
    [
        ((4, ["model"]), "`(4,)`"),
        (((4,), "model"), "`['model']`"),
        (((1,), ["model"], "cpu:0"), "must be a list of names"),
        (((1,), ["model"], 1), "must be a list of names"),
    ],
)
def test_arguments_of_a_mesh(arguments, text):
    with pytest.raises(ValueError) as e:
        dist.DeviceMesh(*arguments)
    assert text in str(e.value) and "Received: " in str(e.value)


def test_mesh_of_a_model_parallel_is_that_of_its_map():
    layout_map = dist.LayoutMap(mesh())
    with pytest.raises(ValueError, match="uses the mesh of its LayoutMap"):
        dist.ModelParallel(layout_map=layout_map, device_mesh=mesh((2, 1)))
    with pytest.raises(TypeError, match="layuot"):
        dist.ModelParallel(layout_map=layout_map, layuot=1)
    with pytest.raises(ValueError, match=r"\['batch', 'model'\].*'data'"):
        dist.ModelParallel(layout_map=layout_map, batch_dim_name="data")


# --- what is no distribution, mesh or layout --------------------------------


def not_distributions():
    """Returns pairs of a value and what the error says to write."""
    mesh = named_mesh((1, 2), "cpu")
    layout_map = dist.LayoutMap(mesh)
    return [
        (dist.TensorParallel, "`TensorParallel()`: an instance"),
        (dist.DataParallel, "`DataParallel()`: an instance"),
        (keras.distribution.DataParallel, "`DataParallel()`: an instance"),
        (dist.ModelParallel, "`ModelParallel(layout_map=layout_map)`"),
        (mesh, "`TensorParallel(device_mesh)`"),
        (layout_map, "`ModelParallel(layout_map=layout_map)`"),
        (dist.plan_sharding(mlp, mesh), "`TensorParallel(plan=plan)`"),
        (mlp(), "`distribute_model(model, TensorParallel())`"),
        ("auto", "`TensorParallel()` for a plan"),
        (2, "`TensorParallel(DeviceMesh((n,), ['model']"),
        (["cpu:0", "cpu:1"], "`TensorParallel(DeviceMesh((2,), ['model']"),
        (True, "must be a distribution"),
        ({}, "must be a distribution"),
    ]


@pytest.mark.parametrize("way", ["ours", "keras", "distribute", "verify"])
def test_what_is_no_distribution_is_refused_at_once(way):
    model = mlp()
    x, y = np.zeros((4, 6), "float32"), np.zeros((4, 4), "float32")
    if way == "keras":
        keras_tp.install()
    # Taken before: Keras hands the same function out under several names.
    set_distribution = keras.distribution.set_distribution
    ways = {
        "ours": dist.set_distribution,
        "keras": set_distribution,
        "distribute": lambda value: dist.distribute_model(model, value),
        "verify": lambda value: dist.verify(mlp, value, x, y),
    }
    for value, text in not_distributions():
        with pytest.raises(ValueError) as e:
            ways[way](value)
        assert "`distribution` must be a distribution" in str(e.value)
        assert text in str(e.value)
        assert "Received: distribution=" in str(e.value)
        assert dist.distribution() is None
    assert all(v._layout is None for v in mlp().variables + model.variables)


def test_what_is_no_model_is_refused_at_once():
    split = dist.TensorParallel(named_mesh((1, 2), "cpu"))
    for value in (mlp, split, None, "model.keras", keras.Model):
        with pytest.raises(ValueError, match="existing Keras model.*Received"):
            dist.distribute_model(value, dist.DataParallel(devices=["cpu:0"]))
        with pytest.raises(
            ValueError, match="existing `keras.Model`.*Received"
        ):
            keras_tp.TensorParallelKeras(value)
    x = np.zeros((4, 6), "float32")
    for value in (mlp(), "build"):
        with pytest.raises(ValueError, match="must be a function.*Received"):
            dist.verify(value, dist.DataParallel(devices=["cpu:0"]), x, x)


def test_what_is_no_mesh_is_refused_at_once():
    calls = (
        dist.TensorParallel,
        dist.DataParallel,
        dist.LayoutMap,
        lambda value: dist.plan_sharding(mlp, value),
    )
    mesh = named_mesh((1, 2), "cpu")
    values = [
        (dist.LayoutMap(mesh), "`ModelParallel(layout_map=layout_map)`"),
        (dist.plan_sharding(mlp, mesh), "`TensorParallel(plan=plan)`"),
        (dist.TensorParallel(mesh), "`distribution.device_mesh`"),
        (["cpu:0", "cpu:1"], "DeviceMesh((2,), ['model'], devices)"),
        (2, "list_devices()[:n]"),
        ("auto", "`TensorParallel()`"),
    ]
    for call in calls:
        for value, text in values:
            with pytest.raises(ValueError) as e:
                call(value)
            assert "`device_mesh` to be an instance" in str(e.value)
            assert text in str(e.value)
            assert "Received: device_mesh=" in str(e.value)


def test_arguments_of_a_model_parallel():
    layout_map = dist.LayoutMap(named_mesh((1, 2), "cpu"))
    for arguments in ((layout_map,), (layout_map.device_mesh, layout_map)):
        with pytest.raises(ValueError) as e:
            dist.ModelParallel(*arguments)
        assert "`ModelParallel(layout_map=layout_map)`" in str(e.value)
        assert "Received: " in str(e.value)
    values = [
        (None, "must specify a layout_map"),
        (GOOD, "`layout_map = LayoutMap(device_mesh)`"),
        (layout_map.device_mesh, "`TensorParallel(device_mesh)`"),
        (dist.LayoutMap(None), "needs a mesh"),
    ]
    for value, text in values:
        with pytest.raises(ValueError) as e:
            dist.ModelParallel(layout_map=value)
        assert text in str(e.value) and "Received: " in str(e.value)
    for devices in ("cpu:0", 2, []):
        with pytest.raises(ValueError, match="must be a list of names"):
            dist.DataParallel(devices=devices)


def test_a_list_of_axes_is_a_layout():
    patterns = {k: list(axes) for k, axes in GOOD.items()}
    with model_parallel(patterns).scope():
        model = mlp()
    report = dist.describe(model)
    assert {p: report[f"net/{p}/kernel"].axes for p in ("up", "down")} == {
        "up": (None, "model"),
        "down": ("model", None),
    }
    plan = dist.plan_sharding(
        mlp, named_mesh(), overrides={"net/up/kernel": [None, None]}
    )
    assert plan["net/up/kernel"].axes == (None, None)


@pytest.mark.parametrize("layout", ["model", None, {0: "model"}, (0, 1), 1])
def test_what_is_no_layout(layout):
    device_mesh = named_mesh((1, 2), "cpu")
    uses = [
        lambda: dist.LayoutMap(device_mesh).update({"x": layout}),
        lambda: dist.TensorLayout(layout, device_mesh),
        lambda: dist.plan_sharding(
            mlp, device_mesh, overrides={"net/up/kernel": layout}
        ),
    ]
    for use in uses:
        with pytest.raises(ValueError) as e:
            use()
        assert "(None, 'model')" in str(e.value)
        assert f"={layout!r}" in str(e.value)


def test_a_key_that_is_no_string():
    kernel = mlp().layers[0].kernel
    with pytest.raises(ValueError, match="matches paths.*Received: key="):
        dist.LayoutMap(mesh())[kernel] = (None, "model")


# --- a plan of another model ------------------------------------------------


def test_a_plan_whose_paths_agree_and_sizes_do_not():
    plan = dist.plan_sharding(lambda: mlp(24), mesh())
    model = mlp()
    split = dist.TensorParallel(plan=plan)
    with split.scope():
        with pytest.raises(ValueError) as of_a_new_model:
            mlp()
    with pytest.raises(ValueError) as of_a_model:
        dist.distribute_model(model, split)
    for e in (of_a_new_model, of_a_model):
        for text in ("'net/up/kernel'", "(6, 12)", "(6, 24)", "Received: plan"):
            assert text in str(e.value)
    assert all(v._layout is None for v in model.variables)
    with split.scope():
        assert dist.describe(mlp(24))["net/up/kernel"].is_split


# --- nothing is split -------------------------------------------------------


def swapped():
    """Returns a mesh whose axis `"model"` has one device."""
    return named_mesh((1, 4), "cpu", ("model", "batch"))


def test_axes_swapped():
    (message,) = caught(lambda: dist.TensorParallel(swapped()))
    for text in (
        "Each of the 4 devices holds every variable whole",
        "'model' of size 1",
        "`DeviceMesh((4, 1), ['model', 'batch'])`",
    ):
        assert text in message
    (message,) = caught(
        lambda: dist.plan_sharding(mlp, swapped()).distribution()
    )
    assert "'model' of size 1" in message
    only_batch = named_mesh((4,), "cpu", ("batch",))
    (message,) = caught(lambda: dist.TensorParallel(only_batch))
    assert "no mesh axis splits variables" in message
    assert "`DeviceMesh((4,), ['model'])`" in message
    assert caught(lambda: dist.TensorParallel(named_mesh((1, 4), "cpu"))) == []


def test_axes_swapped_under_a_map():
    shape = mesh().shape
    layout_map = dist.LayoutMap(harness.mesh(shape, ("model", "batch")))
    layout_map.update(GOOD)
    with dist.ModelParallel(layout_map=layout_map).scope():
        model = mlp()
        (message,) = caught(lambda: model.compile("sgd", "mse"))
    assert "'model' of size 1" in message
    assert f"`DeviceMesh({shape[::-1]}, ['model', 'batch'])`" in message
    # Parameters split over the axis of the batch are split.
    with model_parallel({".*up/kernel": (None, "model")}).scope():
        model = mlp()
        assert caught(lambda: model.compile("sgd", "mse")) == []


def test_one_device_for_each_way_that_found_it(monkeypatch):
    lib = keras_tp.backend.distribution_lib
    monkeypatch.setattr(lib, "list_devices", lambda kind=None: ["cpu:0"])
    monkeypatch.setattr(lib, "get_device_count", lambda kind=None: 1)
    model = mlp()
    ways = [
        lambda: dist.set_distribution(dist.TensorParallel()),
        lambda: dist.DataParallel().scope().__enter__(),
        lambda: dist.distribute_model(model, dist.TensorParallel()),
        lambda: keras_tp.TensorParallelKeras(model),
    ]
    for way in ways:
        dist.set_distribution(None)
        monkeypatch.setattr(device_mesh, "_said_alone", [])
        (message,) = caught(way)
        assert "There is only one device here, 'cpu:0'" in message
        assert caught(way) == []
    dist.set_distribution(None)
    monkeypatch.setattr(device_mesh, "_said_alone", [])
    asked = [
        lambda: keras_tp.TensorParallelKeras(mlp(), world_size=1),
        lambda: dist.plan_sharding(mlp, dist.DeviceMesh((1,), ["model"])),
    ]
    assert [caught(way) for way in asked] == [[], []]


# --- set_distribution after the model was built -----------------------------


@pytest.mark.parametrize(
    "use", ["call", "compile", "fit", "evaluate", "predict", "train_on_batch"]
)
def test_distribution_set_after_the_model_was_built(use):
    x, y = np.zeros((4, 6), "float32"), np.zeros((4, 4), "float32")
    model = mlp()
    model.compile("sgd", "mse")
    uses = {
        "call": lambda: model(x),
        "compile": lambda: model.compile("sgd", "mse"),
        "fit": lambda: model.fit(x, y, verbose=0),
        "evaluate": lambda: model.evaluate(x, y, verbose=0),
        "predict": lambda: model.predict(x, verbose=0),
        "train_on_batch": lambda: model.train_on_batch(x, y),
    }
    dist.set_distribution(model_parallel(GOOD))
    with pytest.raises(ValueError) as e:
        uses[use]()
    for text in ("'net'", "distribute_model", "net/up/kernel", "mesh"):
        assert text in str(e.value)


def test_model_of_parts_made_under_different_distributions():
    plain = mlp(name="plain")
    with model_parallel(GOOD).scope():
        inputs = keras.Input((6,))
        outputs = layers.Dense(4, name="head")(plain(inputs))
        model = keras.Model(inputs, outputs)
        with pytest.raises(ValueError) as e:
            model.predict(np.zeros((2, 6)), verbose=0)
    for text in ("plain/up/kernel", "head/kernel", "distribute_model"):
        assert text in str(e.value)


# --- backends ---------------------------------------------------------------


def test_backend_without_a_distributed_runtime():
    pytest.importorskip("scipy", reason="Keras's numpy backend imports it")
    code = (
        "import keras_tp\n"
        "import keras\n"
        "assert keras.config.backend() == 'numpy'\n"
        "try:\n"
        "    keras_tp.distribution.list_devices()\n"
        "except ValueError as e:\n"
        "    print('ERROR', e)\n"
        "try:\n"
        "    keras_tp.install()\n"
        "except ValueError as e:\n"
        "    print('ERROR', e)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={
            **os.environ,
            "KERAS_BACKEND": "numpy",
            "PYTHONPATH": str(ROOT),
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    lines = [ln for ln in result.stdout.splitlines() if ln.startswith("ERROR")]
    assert len(lines) == 2, result.stdout
    for line in lines:
        assert "'numpy'" in line
        assert "Supported backends: 'jax'" in line
        assert "KERAS_BACKEND" in line


# --- plain tensors, integer and boolean variables ---------------------------


class Counting(layers.Layer):
    def build(self, input_shape):
        self.calls = self.add_weight(
            shape=(), dtype="int32", initializer="zeros", trainable=False
        )
        self.keep = self.add_weight(
            shape=(input_shape[-1],),
            dtype="bool",
            initializer="ones",
            trainable=False,
        )

    def call(self, x):
        self.calls.assign(self.calls + 1)
        noise = keras.ops.convert_to_tensor(np.arange(x.shape[-1]))
        kept = keras.ops.cast(self.keep, x.dtype)
        return x * kept + keras.ops.cast(noise, x.dtype)


def test_plain_tensors_and_integer_and_boolean_variables_work():
    def build():
        keras.utils.set_random_seed(3)
        return keras.Sequential(
            [
                keras.Input((6,)),
                layers.Dense(12, name="up"),
                Counting(),
                layers.Dense(4, name="down"),
            ]
        )

    x = np.random.default_rng(0).normal(size=(8, 6)).astype("float32")
    y = np.random.default_rng(1).normal(size=(8, 4)).astype("float32")
    reference = build()
    reference.compile("sgd", "mse")
    want = reference.fit(x, y, batch_size=4, epochs=2, verbose=0).history
    with model_parallel(GOOD).scope():
        model = build()
        model.compile("sgd", "mse")
        got = model.fit(x, y, batch_size=4, epochs=2, verbose=0).history
    np.testing.assert_allclose(got["loss"], want["loss"], rtol=1e-5)
    assert int(model.layers[1].calls.numpy()) == 4
    assert dist.describe(model)[model.layers[0].kernel.path].is_split
