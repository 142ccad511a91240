"""Every operation and layer of Keras has a planning rule, and it is true.

A rule says which dims of inputs and outputs are split together, and what is
summed. That is tried without devices: the function is called on each half of
its inputs, and the halves are put together as the rule says.
"""

import inspect

import keras
import numpy as np
import pytest
from keras.src.ops.operation import Operation

from integration_tests import ops_cases
from integration_tests import ops_layers
from integration_tests import ops_test
from keras_tp import distribution
from keras_tp.distribution.planning import dim_groups
from keras_tp.distribution.planning import planner  # noqa: F401
from keras_tp.distribution.planning import rules
from keras_tp.distribution.planning import trace

HALVES = 2
MODULES = ("core", "image", "linalg", "math", "nn", "numpy")
CALLS_A_FUNCTION = "calls a function that is given: no Keras operations in it"
# Operations that have no rule, and why they need none.
WITHOUT_RULE = {
    **dict.fromkeys(
        (
            "AssociativeScan",
            "ForiLoop",
            "JVP",
            "Map",
            "Scan",
            "Switch",
            "VectorizedMap",
            "WhileLoop",
        ),
        CALLS_A_FUNCTION,
    ),
    "Cond": CALLS_A_FUNCTION,
    "Ndim": "gives an int",
}
# Functions that cannot be called on halves as they are on the whole, and why.
SIZES_ARE_ARGUMENTS = "is given sizes of the whole tensor as arguments"
NOT_BY_HALVES = {
    "argpartition": "fails on TensorFlow for more columns than rows",
    "broadcast_to": SIZES_ARE_ARGUMENTS,
    "image.elastic_transform": "draws random numbers",
    "reshape": SIZES_ARE_ARGUMENTS,
    "slice_update": SIZES_ARE_ARGUMENTS,
    "trapezoid": "an argument of the constructor holds a tensor",
}


def _operations():
    found = set()
    for name in MODULES:
        module = getattr(keras.src.ops, name)
        found |= {
            cls.__name__
            for cls in vars(module).values()
            if inspect.isclass(cls)
            and issubclass(cls, Operation)
            and cls.__module__ == module.__name__
        }
    return found


def test_every_operation_has_a_rule():
    with_rule = {name for is_leaf, name in rules._RULES if not is_leaf}
    assert len(_operations()) > 300
    missing = _operations() - with_rule
    assert missing == set(WITHOUT_RULE), (
        "Give these a rule in `planning/rules_*.py`, or a reason here: "
        f"{missing ^ set(WITHOUT_RULE)}"
    )


class _Called(keras.Model):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.built = True

    def call(self, inputs):
        return self.function(*inputs)


class _Groups(dim_groups.Classes):
    """The groups of dims of a function's inputs, which may all be split."""

    def __init__(self, case):
        spec = [
            keras.KerasTensor(x.shape, keras.backend.standardize_dtype(x.dtype))
            for x in case.inputs
        ]
        graph = trace.trace(_Called(case.function), spec)
        self.inputs, graph.inputs = graph.inputs, []
        super().__init__(graph, HALVES)

    def dims_in(self, value, root):
        """Returns `(dim, blocks)` of each dim of a value that is in a group."""
        found = []
        for i, size in enumerate(value.shape):
            if size > 1:
                group, blocks = self.class_of((value.index, i))
                if group == root and not self.obstacle(value, i):
                    found.append((i, blocks))
        return found

    def free(self):
        """Returns the groups of the inputs' dims that may be split."""
        return {
            self.class_of((value.index, i))[0]
            for value in self.inputs
            for i, size in enumerate(value.shape)
            if size > 1 and not self.obstacle(value, i)
        }


def _half(x, k, dim, blocks):
    parts = np.split(x, blocks, axis=dim)
    return np.concatenate(
        [np.split(p, HALVES, axis=dim)[k] for p in parts], dim
    )


def _together(halves, dim, blocks):
    parts = [np.split(half, blocks, axis=dim) for half in halves]
    return np.concatenate([p for pair in zip(*parts) for p in pair], dim)


def _arrays(outputs):
    return [
        np.asarray(keras.ops.convert_to_numpy(x))
        for x in keras.tree.flatten(outputs)
    ]


# How the results of halves are put together where a rule says "partial".
_SUMS = (
    lambda a, b: a + b,
    np.maximum,
    np.minimum,
    lambda a, b: (a + b) / 2,
    np.logical_and,
    np.logical_or,
)


def _alike(a, b):
    return a.shape == b.shape and np.allclose(
        a, b, rtol=1e-4, atol=1e-5, equal_nan=True
    )


def _wrong(case, groups, root, expected):
    """Returns why a group of dims is not one, or `None`."""
    split = [groups.dims_in(value, root) for value in groups.inputs]
    if any(len(dims) > 1 for dims in split):
        return None
    for value in groups.graph.values:
        if value.kind == "constant" and groups.dims_in(value, root):
            return None
    summed = {
        partial.tensor.index
        for partial in groups.dims.partials
        if not partial.backward and groups.class_of(partial.node)[0] == root
    }
    if summed - {value.index for value in groups.graph.outputs}:
        # What follows the sum is computed of whole tensors.
        return None
    halves = []
    for k in range(HALVES):
        given = [
            _half(x, k, *dims[0]) if dims else x
            for x, dims in zip(case.inputs, split)
        ]
        try:
            halves.append(_arrays(case.function(*_tensors(given))))
        except Exception as error:
            return f"fails on halves along {split}: {str(error)[:200]}"
    for j, value in enumerate(groups.graph.outputs):
        pair = [half[j] for half in halves]
        dims = groups.dims_in(value, root)
        if dims:
            right = _alike(_together(pair, *dims[0]), expected[j])
        elif value.index in summed:
            right = any(_alike(add(*pair), expected[j]) for add in _SUMS)
        else:
            right = all(_alike(half, expected[j]) for half in pair)
        if not right:
            return f"output {j} is wrong with inputs split along {split}"
    return None


def _tensors(arrays):
    return [keras.ops.convert_to_tensor(x) for x in arrays]


@pytest.mark.parametrize(
    "name", sorted({*ops_test.FUNCTIONS} - {*NOT_BY_HALVES})
)
def test_the_rule_of_a_function_is_true(name):
    wrong = []
    for case in ops_cases.cases_of(name):
        try:
            groups = _Groups(case)
            expected = _arrays(case.function(*_tensors(case.inputs)))
        except Exception:
            continue
        for root in sorted(groups.free()):
            why = _wrong(case, groups, root, expected)
            if why:
                wrong.append(f"{case.name}: {why}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "name", sorted({**ops_layers.TRAINED, **ops_layers.OF_IDS})
)
def test_every_layer_has_a_rule(name):
    mesh = keras.distribution.DeviceMesh(
        (1, 2), ["batch", "model"], ["cpu:0", "cpu:1"]
    )
    plan = distribution.plan_sharding(lambda: ops_layers.model(name), mesh)
    assert plan.without_rule == {}
