import copy
import json
import random

import keras
import pytest
from keras import layers

from integration_tests import harness
from keras_tp import distribution
from keras_tp.distribution import ShardingPlan
from keras_tp.distribution.planning import plan_file


def build():
    inputs = keras.Input((12,))
    x = layers.Dense(16, activation="relu", name="up")(inputs)
    return keras.Model(inputs, layers.Dense(6, name="down")(x), name="mlp")


@pytest.fixture
def plan():
    return distribution.plan_sharding(build, harness.mesh((1, 2)))


@pytest.fixture
def gathering():
    """A plan that gathers the output of a layer."""
    x = keras.Input((None, 16))
    y = layers.LayerNormalization()(layers.Dense(64, name="wide")(x))
    mesh = harness.mesh((1, 2))
    return distribution.plan_sharding(keras.Model(x, y), mesh, gather_outputs=0)


def test_save_and_load(plan, tmp_path):
    path = harness.own_folder(tmp_path) / "plan.json"
    path.write_text("older")
    plan.save(path)
    assert [p.name for p in path.parent.iterdir()] == ["plan.json"]
    assert ShardingPlan.load(path).to_json() == plan.to_json()
    assert ShardingPlan.load(str(path)).variables == plan.variables
    # The text alone has no digest.
    path.write_text(plan.to_json())
    assert ShardingPlan.load(path).to_json() == plan.to_json()


def test_sizes_of_a_sliced_text():
    """The first token is cut off."""
    x = keras.Input((None, 16))
    y = layers.Dense(64, name="up")(x[:, 1:])
    model = keras.Model(x, layers.Dense(16, name="down")(y))
    plan = distribution.plan_sharding(model, harness.mesh((1, 2)))
    again = ShardingPlan.from_json(plan.to_json())
    assert plan.reductions[0].size.offset == -1
    assert again.to_json() == plan.to_json()
    assert again.collectives(3, 9)["all_reduce"] == (1, 3 * 8 * 16 * 4)


def test_gathers_are_saved_where_there_are_any(plan, gathering):
    assert "gathers" not in plan.to_json()
    again = ShardingPlan.from_json(gathering.to_json())
    assert again.to_json() == gathering.to_json()
    assert again.gathers == gathering.gathers
    assert again.collectives(3, 8)["all_gather"] == (1, 3 * 8 * 64 * 4)
    assert list(again.layout_map)[-1] == "wide/output"


@pytest.mark.parametrize(
    "change, field",
    [
        (lambda data: data.update(gathers=[]), "gathers has to be"),
        (lambda data: data.update(gathers={"a": 1}), "gathers has to be"),
        (lambda data: data["gathers"][0].update(axes=3), r"gathers\[0\].axes"),
        (lambda data: data["gathers"][0].update(axes=[None]), r"\[0\].axes"),
        (lambda data: data["gathers"][0].update(axes=[None, "a"]), "'model'"),
        (lambda data: data["gathers"][0].update(axes=["model", None]), "axes"),
        (lambda data: data["gathers"][0].update(path=1), r"gathers\[0\].path"),
        (lambda data: data["gathers"][0].update(is_scattered=1), "is_scatt"),
        (lambda data: data["gathers"][0].update(size=[1]), r"\[0\].size"),
    ],
)
def test_gathers_that_are_wrong(gathering, change, field):
    data = json.loads(gathering.to_json())
    change(data)
    with pytest.raises(ValueError, match=field):
        ShardingPlan.from_json(json.dumps(data))


def test_an_error_leaves_the_older_file(plan, tmp_path, monkeypatch):
    path = harness.own_folder(tmp_path) / "plan.json"
    plan.save(path)
    older = path.read_bytes()
    monkeypatch.setattr(ShardingPlan, "to_json", lambda self: "\ud800")
    with pytest.raises(ValueError):
        plan.save(path)
    assert path.read_bytes() == older


def set_to(*keys_and_value):
    *keys, last, value = keys_and_value

    def change(data):
        for key in keys:
            data = data[key]
        data[last] = value

    return change


def without(*keys):
    *keys, last = keys

    def change(data):
        for key in keys:
            data = data[key]
        del data[last]

    return change


VARIABLE = ("variables", 0)
REDUCTION = ("reductions", 0)


@pytest.mark.parametrize(
    "change, field",
    [
        (without("model"), r"Missing: \['model'\]"),
        (without("format"), "no `format`"),
        (set_to("format", True), "format=True"),
        (set_to("format", 2), "format=2"),
        (set_to("more", 1), r"Unknown: \['more'\]"),
        (set_to("model", None), "model has to be"),
        (set_to("mesh", [1, 2]), "mesh has to be"),
        (set_to("mesh", "shape", [1, -2]), "mesh.shape"),
        (set_to("mesh", "shape", [1, 2.0]), "mesh.shape"),
        (set_to("mesh", "shape", [2**30, 2]), "mesh.shape"),
        (set_to("mesh", "axis_names", ["model"]), "mesh.axis_names"),
        (set_to("mesh", "axis_names", ["model", "model"]), "mesh.axis_names"),
        (set_to("axis", "other"), "axis has to be"),
        (set_to("without_rule", {"a": 1}), "without_rule"),
        (set_to("activations", [[1, 1]]), r"activations\[0\]"),
        (set_to("activations", [[-1, 1, 0]]), r"activations\[0\]"),
        (set_to("split_outputs", {}), "split_outputs has to be a list"),
        (without(*VARIABLE, "why"), r"variables\[0\].*Missing: \['why'\]"),
        (set_to(*VARIABLE, "wyh", ""), r"variables\[0\].*Unknown: \['wyh'\]"),
        (set_to(*VARIABLE, []), r"variables\[0\] has to be"),
        (set_to(*VARIABLE, "path", 1), r"variables\[0\].path"),
        (set_to(*VARIABLE, "path", "up/bias"), r"variables\[1\].path"),
        (set_to(*VARIABLE, "shape", [12, -16]), r"variables\[0\].shape"),
        (set_to(*VARIABLE, "shape", 12), r"variables\[0\].shape"),
        (set_to(*VARIABLE, "dtype", "floot32"), r"variables\[0\].dtype"),
        (set_to(*VARIABLE, "trainable", 1), r"variables\[0\].trainable"),
        (set_to(*VARIABLE, "axes", [None]), r"variables\[0\].axes"),
        (set_to(*VARIABLE, "axes", [None, "modem"]), r"variables\[0\].axes"),
        (set_to(*VARIABLE, "axes", ["model", "model"]), "without repetition"),
        (set_to(*VARIABLE, "axes", [None, ["model", 1]]), "variables.*axes"),
        (set_to(*VARIABLE, "axes", [None, []]), r"variables\[0\].axes"),
        (set_to(*VARIABLE, "shape", [12, 15]), "15 divides by 2"),
        (set_to(*VARIABLE, "blocks", 0), r"variables\[0\].blocks"),
        (set_to(*VARIABLE, "obstacles", [""]), r"variables\[0\].obstacles"),
        (set_to(*REDUCTION, "terms", -1), r"reductions\[0\].terms"),
        (set_to(*REDUCTION, "backward", "no"), r"reductions\[0\].backward"),
        (set_to(*REDUCTION, "size", [1, 0]), r"reductions\[0\].size"),
        (set_to(*REDUCTION, "size", ["1", 0, 0]), r"reductions\[0\].size"),
        (set_to(*REDUCTION, "size", [1, 0, 0, "1"]), r"reductions\[0\].size"),
        (set_to(*REDUCTION, "size", [1, 0, 0, 2**40]), "reductions.*size"),
        (set_to(*REDUCTION, "size", [1, 0, 0, 1, 1, 1]), "reductions.*size"),
    ],
)
def test_fields_that_are_wrong(plan, change, field, tmp_path):
    data = json.loads(plan.to_json())
    change(data)
    path = harness.own_folder(tmp_path) / "wrong_plan.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=f"wrong_plan.json.*{field}"):
        ShardingPlan.load(path)


@pytest.mark.parametrize(
    "text",
    [
        *("", "null", "1", "[]", "{}", '{"format": NaN}', "\ud800"),
        "[" * 100_000,
        '{"format": 1, "format": 1}',
    ],
    ids=range(9),
)
def test_texts_that_are_no_plan(text, tmp_path):
    path = harness.own_folder(tmp_path) / "wrong_plan.json"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ValueError, match="wrong_plan.json"):
        ShardingPlan.load(path)


def test_nan_and_infinity(plan):
    for value in ("NaN", "Infinity", "-Infinity", "1e999"):
        text = plan.to_json().replace('"size": [', f'"size": [{value}, ', 1)
        text = text.replace(f"{value}, 64, ", f"{value}, ", 1)
        with pytest.raises(ValueError, match="plan"):
            ShardingPlan.from_json(text)


def random_value(draw, value):
    """Returns another value of a field, often of another type."""
    return draw.choice(
        [
            *(None, True, 0, -1, 1.5, 10**30, "", "model", [], {}, [None]),
            *([value], {"a": value}, [[[]]], "x" * 99, [1, 2], [-1, 0]),
        ]
    )


def places(data, keys=()):
    """Gives the keys of all fields."""
    items = ()
    if isinstance(data, dict):
        items = data.items()
    elif isinstance(data, list):
        items = enumerate(data)
    for key, value in items:
        yield (*keys, key)
        yield from places(value, (*keys, key))


@pytest.mark.parametrize("name", ["plan", "gathering"])
def test_plans_with_random_fields(name, request):
    """Each is refused, or read as the very plan that it says."""
    plan = request.getfixturevalue(name)
    draw, whole = random.Random(4), json.loads(plan.to_json())
    all_places, refused = list(places(whole)), 0
    for _ in range(400):
        data = copy.deepcopy(whole)
        *keys, last = draw.choice(all_places)
        held = data
        for key in keys:
            held = held[key]
        if draw.random() < 0.2:
            del held[last]
        else:
            held[last] = random_value(draw, held[last])
        text = json.dumps(data)
        try:
            read = ShardingPlan.from_json(text)
        except ValueError:
            refused += 1
        else:
            assert json.loads(read.to_json()) == data
            # It can be used as well.
            assert read.layout_map and read.summary()
            assert read.memory(4, 5)["total"] >= 0
    assert 300 < refused < 400


def test_a_file_that_was_changed(plan, tmp_path):
    path = harness.own_folder(tmp_path) / "plan.json"
    plan.save(path)
    text = path.read_text()
    path.write_text(text.replace('"up/kernel"', '"us/kernel"'))
    with pytest.raises(ValueError, match="SHA-256 differs"):
        ShardingPlan.load(path)
    line = f' "{plan_file.DIGEST}"'
    changed = path.read_text().partition(f",\n{line}")[0] + "}"
    path.write_text(changed)
    assert "us/kernel" in ShardingPlan.load(path)
