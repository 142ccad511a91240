"""Inputs for the public functions of Keras that take tensors.

The functions are read from Keras. Most of them need no row here: their
parameters say what they take. The others have a row in `INPUTS`, and a
function that has neither fails `ops_test.py`.
"""

import collections
import inspect
import itertools

import keras
import numpy as np

from integration_tests import ops_inputs
from integration_tests import ops_inputs_arrays
from integration_tests import ops_inputs_math

# Where the names of parameters do not say what a function takes. A row is
# `(function, inputs)`, or a list of `(label, function, inputs)`.
INPUTS = {**ops_inputs_arrays.INPUTS, **ops_inputs_math.INPUTS}


class Case(
    collections.namedtuple("Case", ["name", "function", "inputs", "jit"])
):
    """A computation, and the arrays that are split for it.

    Args:
        name: String, unique among the cases of all functions.
        function: Callable of tensors that returns a structure of tensors.
        inputs: List of arrays.
        jit: Boolean, whether it can be traced: its result has a shape that
            does not depend on values.
    """


def public_functions():
    """Returns a dict of name to function: what `keras.ops` has, and random."""
    found = {}
    for prefix, module in (
        ("", keras.ops),
        ("", keras.ops.nn),
        ("", keras.ops.linalg),
        ("", keras.ops.numpy),
        ("image.", keras.ops.image),
        ("random.", keras.random),
    ):
        for name in dir(module):
            function = getattr(module, name)
            if name.startswith("_") or not callable(function):
                continue
            found.setdefault(prefix + name, function)
    return found


def _elementwise(function):
    return [("", function, [ops_inputs.numbers(4, 6)])]


def _of_two(function):
    same = [ops_inputs.numbers(4, 6), ops_inputs.numbers(4, 6, seed=1)]
    broadcast = [ops_inputs.numbers(1, 6), ops_inputs.numbers(2, 4, 1)]
    return [("", function, same), ("broadcast", function, broadcast)]


def _reduction(function):
    x = ops_inputs.numbers(4, 6, 8)
    rows = [("all", function, [x])]
    for axis in (1, -1):
        rows.append((f"axis {axis}", _with(function, axis=axis), [x]))
    rows.append(
        ("kept", _with(function, axis=1, keepdims=True), [x]),
    )
    if function.__name__ not in ops_inputs.ONE_AXIS:
        rows.append(("two", _with(function, axis=(0, 2)), [x]))
        rows.append(
            ("two kept", _with(function, axis=(0, 1), keepdims=True), [x])
        )
    return rows


def _along_axis(function):
    x = ops_inputs.numbers(4, 6)
    return [
        (f"axis {axis}", _with(function, axis=axis), [x]) for axis in (0, 1)
    ]


def _with(function, **arguments):
    return lambda *tensors: function(*tensors, **arguments)


# By the names of the required parameters, then of all.
_BY_SIGNATURE = [
    (("x",), ("x", "axis", "keepdims"), _reduction),
    (("x",), ("x", "axis", "keepdims", "dtype"), _reduction),
    (("x",), ("x", "axis", "keepdims", "initial"), _reduction),
    (("x",), ("x", "axis"), _along_axis),
    (("x",), ("x", "axis", "dtype"), _along_axis),
    (("x1", "x2"), None, _of_two),
    (("x", "y"), None, _of_two),
    (("x",), None, _elementwise),
]


def rows_of(name, function):
    """Returns what to try of a function, or `None` if it has no place."""
    if name in INPUTS:
        make = INPUTS[name]
        return [
            row if isinstance(row[0], str) else ("", *row)
            for row in (make if isinstance(make, list) else [make])
        ]
    parameters = inspect.signature(function).parameters
    required = tuple(
        key for key, p in parameters.items() if p.default is p.empty
    )
    for wanted, every, make in _BY_SIGNATURE:
        if required == wanted and every in (None, tuple(parameters)):
            return make(function)
    return None


def cases_of(name):
    """Returns the cases of a public function; `None` if it has no place."""
    function = public_functions()[name]
    rows = rows_of(name, function)
    if rows is None:
        return None
    domain = ops_inputs.DOMAINS.get(name)
    return [
        Case(
            f"{name} ({label})" if label else name,
            tried,
            [domain(x) for x in inputs] if domain else list(inputs),
            name not in ops_inputs.EAGER,
        )
        for label, tried, inputs in rows
    ]


def splits_of(inputs, count=2):
    """Returns the ways to split inputs: a dim, or `None`, of each.

    Each divisible dim of each input, and pairs of dims of two inputs. Of three
    and more, all of them along one dim too.
    """
    dims = [
        [dim for dim, size in enumerate(x.shape) if size % count == 0 and size]
        for x in inputs
    ]
    nothing = (None,) * len(inputs)
    found = [
        (*nothing[:i], dim, *nothing[i + 1 :])
        for i, those in enumerate(dims)
        for dim in those
    ]
    if len(inputs) == 2:
        found += itertools.product(*dims)
    elif len(inputs) > 2:
        for dim in range(max(x.ndim for x in inputs)):
            split = tuple(dim if dim in those else None for those in dims)
            if sum(d is not None for d in split) > 1:
                found.append(split)
    return found


def axes_of(inputs, dims, axis="model"):
    """Returns the axes of each dim of each input, for one split dim of each."""
    return [
        tuple(axis if d == dim else None for d in range(x.ndim))
        for x, dim in zip(inputs, dims)
    ]


def splits_over_two_axes(inputs, limit=40):
    """Returns axes of each dim of each input, on a mesh of two axes.

    One dim over one of the axes, while the other axis splits nothing; two dims
    of the inputs, over both axes; dims of two inputs over one axis.
    """
    places = [
        (i, dim)
        for i, x in enumerate(inputs)
        for dim, size in enumerate(x.shape)
        if size % 2 == 0 and size
    ]

    def split(axis_by_place):
        return [
            tuple(axis_by_place.get((i, dim)) for dim in range(x.ndim))
            for i, x in enumerate(inputs)
        ]

    found = [split({place: "batch"}) for place in places]
    found += [split({place: "model"}) for place in places]
    for a, b in itertools.combinations(places, 2):
        found.append(split({a: "batch", b: "model"}))
        if a[0] != b[0]:
            found.append(split({a: "batch", b: "batch"}))
    return found[:limit]


def weights_like(outputs):
    """Returns random weights for the sum whose gradient is taken."""
    rng = np.random.default_rng(7)
    return [rng.uniform(0.5, 1.5, tuple(x.shape)) for x in outputs]
