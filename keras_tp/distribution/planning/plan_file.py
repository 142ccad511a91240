"""Reads and writes the text of a plan; checks each field on reading."""

import hashlib
import json
import math

from keras_tp.distribution.planning import cost
from keras_tp.distribution.planning.dim_groups import may_be_uneven
from keras_tp.distribution.planning.plan_rows import PlannedGather
from keras_tp.distribution.planning.plan_rows import PlannedReduction
from keras_tp.distribution.planning.plan_rows import PlannedVariable

FORMAT_VERSION = 1

DIGEST = "sha256"
# A field that only some plans have.
_GATHERS = "gathers"
# Fields that only some rows have, which are then true.
_OPTIONAL = ("sequence_parallel", "gathered_again", "scattered")
_MOST_DEVICES = 2**20
# Largest exponent of the batch or the sequence length in a size.
_MOST_POWER = 16


def read(text):
    """Returns the arguments of the `ShardingPlan` that a text describes.

    Its mesh is a dict with a `shape` and `axis_names`.

    Args:
        text: String that `ShardingPlan.to_json` or `save` wrote.

    Raises:
        ValueError: if the text is not a plan; the error names the field.
    """
    try:
        data = json.loads(
            text,
            object_pairs_hook=_without_repetition,
            parse_constant=_no_number,
        )
    except (ValueError, RecursionError) as e:
        raise ValueError(
            f"This is not a sharding plan, or it is cut off: {e!r}. "
            f"Received: {text[:60]!r}"
        ) from e
    if not isinstance(data, dict) or "format" not in data:
        raise ValueError(
            "This is not a sharding plan: it has no `format`. Received: "
            f"{text[:60]!r}"
        )
    if not _is_int(data["format"], 1) or data["format"] != FORMAT_VERSION:
        raise ValueError(
            f"A sharding plan must have format {FORMAT_VERSION}. Plan the "
            f"model again. Received: format={data['format']!r}"
        )
    saved = data.pop(DIGEST, None)
    if saved is not None and saved != _digest(data):
        raise ValueError(
            "The plan is not the one that was saved: its SHA-256 differs. "
            f"Remove the line with `{DIGEST}` if it was changed by hand. "
            f"Received: {DIGEST}={saved!r}"
        )
    _check(data)
    return dict(
        model_name=data["model"],
        device_mesh=data["mesh"],
        axis=data["axis"],
        variables=[_variable(row) for row in data["variables"]],
        reductions=[
            PlannedReduction(**{**row, "size": cost.Size(*row["size"])})
            for row in data["reductions"]
        ],
        activations=[cost.Size(*size) for size in data["activations"]],
        split_outputs=[cost.Size(*size) for size in data["split_outputs"]],
        without_rule=data["without_rule"],
        gathers=[
            PlannedGather(
                **{
                    **row,
                    "axes": tuple(row["axes"]),
                    "size": cost.Size(*row["size"]),
                }
            )
            for row in data.get(_GATHERS, ())
        ],
    )


def _variable(row):
    axes = (tuple(a) if isinstance(a, list) else a for a in row["axes"])
    listed = {
        "shape": tuple(row["shape"]),
        "axes": tuple(axes),
        "obstacles": tuple(row["obstacles"]),
    }
    return PlannedVariable(**{**row, **listed})


def text_of(plan):
    """Returns a plan as text: one line for each variable and sum."""
    mesh = plan.device_mesh
    head = {
        "format": FORMAT_VERSION,
        "model": plan.model_name,
        "mesh": {
            "shape": list(mesh.shape),
            "axis_names": list(mesh.axis_names),
        },
        "axis": plan.axis,
        "without_rule": dict(sorted(plan.without_rule.items())),
        "activations": [size.listed() for size in plan.activations],
        "split_outputs": [size.listed() for size in plan.split_outputs],
    }

    def listed(row):
        fields = {k: v for k, v in row._asdict().items() if k not in _OPTIONAL}
        fields |= {k: True for k in _OPTIONAL if getattr(row, k, False)}
        if "size" in fields:
            fields["size"] = row.size.listed()
        return fields

    lists = {
        "variables": [listed(row) for row in plan.variables],
        "reductions": [listed(row) for row in plan.reductions],
    }
    if plan.gathers:
        lists[_GATHERS] = [listed(row) for row in plan.gathers]
    lines = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in head.items()]
    for name, rows in lists.items():
        body = ",\n".join(f"  {json.dumps(row)}" for row in rows)
        lines.append(f"{json.dumps(name)}: [\n{body}\n ]")
    return "{\n " + ",\n ".join(lines) + "\n}\n"


def with_digest(text):
    """Returns the text of a plan with a digest as its last field."""
    digest = _digest(json.loads(text))
    body = text.rstrip().removesuffix("}").rstrip()
    return f'{body},\n "{DIGEST}": "{digest}"\n}}\n'


def _digest(data):
    text = json.dumps(data, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _without_repetition(pairs):
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError(f"a field is repeated in {list(found)}")
    return found


def _no_number(name):
    raise ValueError(f"{name} is not a number of a plan")


def _check(data):
    _check_fields(
        "the plan",
        data,
        *("format", "model", "mesh", "axis", "without_rule", "activations"),
        *("split_outputs", "variables", "reductions"),
        *([_GATHERS] if _GATHERS in data else []),
    )
    _need(isinstance(data["model"], str), "model", "a string", data["model"])
    sizes = _checked_mesh(data["mesh"])
    axis = data["axis"]
    _need(
        axis is None or isinstance(axis, str) and axis in sizes,
        *("axis", f"an axis of the mesh, {list(sizes)}, or null", axis),
    )
    rules = data["without_rule"]
    _need(
        isinstance(rules, dict)
        and all(isinstance(path, str) for path in rules.values()),
        *("without_rule", "an object of strings", rules),
    )
    for name in ("activations", "split_outputs"):
        for where, size in _rows(name, data[name]):
            _check_size(where, size)
    paths = set()
    for where, row in _rows("variables", data["variables"]):
        _check_variable(where, row, sizes)
        _need(
            row["path"] not in paths,
            *(f"{where}.path", "a unique path", row["path"]),
        )
        paths.add(row["path"])
    for where, row in _rows("reductions", data["reductions"]):
        _check_reduction(where, row)
    if _GATHERS in data:
        _need(data[_GATHERS], _GATHERS, "a list with rows", data[_GATHERS])
        for where, row in _rows(_GATHERS, data[_GATHERS]):
            _check_gather(where, row, axis)


def _checked_mesh(mesh):
    _check_fields("mesh", mesh, "shape", "axis_names")
    shape, names = mesh["shape"], mesh["axis_names"]
    _need(
        isinstance(shape, list)
        and shape
        and all(_is_int(size, 1) for size in shape)
        and math.prod(shape) <= _MOST_DEVICES,
        *("mesh.shape", f"sizes for at most {_MOST_DEVICES} devices", shape),
    )
    _need(
        isinstance(names, list)
        and len(names) == len(shape)
        and all(isinstance(name, str) and name for name in names)
        and len(set(names)) == len(names),
        *("mesh.axis_names", f"{len(shape)} different names", names),
    )
    return dict(zip(names, shape))


def _check_variable(where, row, sizes):
    _check_fields(
        where,
        row,
        *("path", "shape", "dtype", "trainable", "axes", "blocks", "why"),
        "obstacles",
        optional=["sequence_parallel", "gathered_again"],
    )
    _check_optional(where, row, "sequence_parallel")
    _check_optional(where, row, "gathered_again")
    shape, axes, obstacles = row["shape"], row["axes"], row["obstacles"]

    def need(is_right, name, what):
        _need(is_right, f"{where}.{name}", what, row[name])

    _check_types(where, row, path=str, dtype=str, trainable=bool, why=str)
    is_shape = isinstance(shape, list) and all(_is_int(n, 0) for n in shape)
    need(is_shape, "shape", "a list of sizes")
    need(_is_dtype(row["dtype"]), "dtype", "a dtype of Keras")
    need(_is_int(row["blocks"], 1), "blocks", "1 or more")
    are_texts = (
        isinstance(obstacles, list)
        and len(obstacles) == len(shape)
        and all(isinstance(text, str) for text in obstacles)
    )
    need(are_texts, "obstacles", f"{len(shape)} strings")
    is_alike = isinstance(axes, list) and len(axes) == len(shape)
    need(is_alike, "axes", f"{len(shape)} entries, one for each dim")
    names = []
    for size, entry in zip(shape, axes):
        if entry is None:
            continue
        listed = entry if isinstance(entry, list) else [entry]
        known = all(isinstance(n, str) and n in sizes for n in listed)
        need(listed and known, "axes", f"axes of the mesh, {list(sizes)}")
        names += listed
        count = math.prod(sizes[name] for name in listed)
        fits = size % count == 0 or may_be_uneven(size, count)
        need(fits, "axes", f"axes such that {size} divides by {count}")
    is_once = len(set(names)) == len(names)
    need(is_once, "axes", "axes without repetition")


def _check_reduction(where, row):
    _check_fields(
        where,
        row,
        *("path", "operation", "backward", "terms", "size"),
        optional=["scattered"],
    )
    _check_optional(where, row, "scattered")
    _check_types(where, row, path=str, operation=str, backward=bool)
    _need(_is_int(row["terms"], 1), f"{where}.terms", "1 or more", row["terms"])
    _check_size(f"{where}.size", row["size"])


def _check_gather(where, row, axis):
    _check_fields(where, row, "path", "axes", "is_scattered", "size")
    _check_types(where, row, path=str, is_scattered=bool)
    axes = row["axes"]
    _need(
        isinstance(axes, list)
        and len(axes) >= 2
        and all(entry is None or entry == axis for entry in axes)
        and len([entry for entry in axes if entry is not None]) <= 1
        and axes[0] is None,
        *(f"{where}.axes", f"nulls, and {axis!r} once at most", axes),
    )
    _check_size(f"{where}.size", row["size"])


def _check_size(where, size):
    is_right = (
        isinstance(size, list)
        and 3 <= len(size) <= 5
        and (_is_int(size[0], 0) or _is_float(size[0]))
        and all(_is_int(n, 0) and n <= _MOST_POWER for n in size[1:3])
        and all(map(_is_offset, size[3:]))
    )
    _need(
        is_right,
        where,
        "bytes, two small exponents and two numbers at most",
        size,
    )


def _check_fields(where, row, *names, optional=()):
    _need(isinstance(row, dict), where, f"an object of {list(names)}", row)
    missing = [name for name in names if name not in row]
    names += tuple(name for name in optional if name in row)
    unknown = [name for name in row if name not in names]
    if missing or unknown:
        raise ValueError(
            f"In a sharding plan, {where} has the fields {list(names)}. "
            f"Missing: {missing}. Unknown: {unknown}. Plan the model again. "
            f"Received: {str(row)[:60]}"
        )


def _check_optional(where, row, name):
    value = row.get(name, True)
    _need(value is True, f"{where}.{name}", "true, or left out", value)


def _check_types(where, row, **types):
    for name, kind in types.items():
        _need(
            type(row[name]) is kind,
            *(f"{where}.{name}", f"of type {kind.__name__}", row[name]),
        )


def _rows(name, rows):
    _need(isinstance(rows, list), name, "a list", rows)
    for index, row in enumerate(rows):
        yield f"{name}[{index}]", row


def _need(is_right, where, what, value):
    if not is_right:
        raise ValueError(
            f"In a sharding plan, {where} has to be {what}. Plan the model "
            f"again. Received: {str(value)[:200]}"
        )


def _is_int(value, least):
    return type(value) is int and least <= value < 2**63


def _is_float(value):
    return type(value) is float and math.isfinite(value) and value >= 0


def _is_offset(value):
    is_number = type(value) in (int, float) and math.isfinite(value)
    return is_number and abs(value) < 2**31


def _is_dtype(name):
    try:
        cost.item_bytes(name)
    except ValueError:
        return False
    return True
