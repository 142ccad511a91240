"""A model as a graph: Keras operations, and the tensors between them."""

import functools
import math
import re

from keras import tree

from keras_tp.distribution.planning import lengths
from keras_tp.distribution.planning.cost import item_bytes

INPUT = "input"
VARIABLE = "variable"
CONSTANT = "constant"
RESULT = "result"


class Value:
    """A symbolic tensor: its shape, its dtype and its origin.

    Args:
        index: Int, its position in `Graph.values`.
        kind: One of `"input"`, `"variable"`, `"constant"` and `"result"`.
        shape: Tuple of ints; no dim is unknown, see `trace`.
        dtype: String.
        path: String, path of the variable or layer it belongs to.
        trainable: Boolean. Whether it is a trainable variable.
    """

    def __init__(self, index, kind, shape, dtype, path="", trainable=False):
        self.index = index
        self.kind = kind
        self.shape = shape
        self.dtype = dtype
        self.path = path
        self.trainable = trainable

    @property
    def ndim(self):
        return len(self.shape)

    @property
    def nbytes(self):
        return math.prod(self.shape) * item_bytes(self.dtype)

    def __repr__(self):
        return (
            f"<Value {self.index} {self.kind} {self.dtype}{self.shape} "
            f"{self.path!r}>"
        )


class Step:
    """One operation, or one leaf: a layer that is not traced through.

    Args:
        operation: The `keras.Operation` or `keras.Layer`.
        args: Structure, in which each tensor is a `Value`.
        kwargs: Dict, in which each tensor is a `Value`.
        outputs: List of `Value`.
        path: String, path of the innermost layer around it.
        is_leaf: Boolean. Whether the step is a layer.
        variables: List of `Value`, the variables of a leaf.
        again: Int, the same for all steps that rematerialization computes again
            at a time. Defaults to `None`: the step is not computed again.
    """

    def __init__(
        self,
        operation,
        args,
        kwargs,
        outputs,
        path,
        is_leaf,
        variables,
        again=None,
    ):
        self.operation = operation
        self.args = args
        self.kwargs = kwargs
        self.outputs = outputs
        self.path = path
        self.is_leaf = is_leaf
        self.variables = variables
        self.again = again
        self.inputs = values_in((args, kwargs))

    @property
    def kind(self):
        """Name of the class of the operation or layer."""
        return type(self.operation).__name__

    def __repr__(self):
        return (
            f"<Step {self.kind} in {self.path!r}: {self.inputs} -> "
            f"{self.outputs}>"
        )


class Graph:
    """The steps of one forward pass, in the order in which they ran.

    Attributes:
        name: String, name of the model.
        values: List of all `Value`s.
        steps: List of `Step`s.
        inputs: List of the `Value`s the model is called on.
        outputs: List of the `Value`s it returns.
        variables: List of `Value`s, one for each weight of the model, used or
            not, in the natural order of their paths. The order of
            `model.weights` differs from run to run.
        derived: List of `(value, dims, kernel)` for each variable that LoRA
            or quantization adds: its `Value`, the kernel's dim (or `None`) for
            each of its dims, and the `Value` of the kernel.
        batch: Int, placeholder size of the batch.
        length: Int, placeholder size of other unknown dims.
        leaves: Dict of the path of each layer that could not be traced
            through to the reason.
        layer_outputs: List of `(path, position, value)` for each call of a
            layer that has no layers inside: the `Value` that it returned, and
            the number of steps before that.
        returned: Set of the indices of all `Value`s that a layer returned.
        dropped: List of the `Value`s of which `Dropout` drops numbers. The
            trace, which trains nothing, has no step for it.
        is_again: Boolean. Whether rematerialization computes all of the model
            again.
    """

    def __init__(self, name, batch, length):
        self.name = name
        self.values = []
        self.steps = []
        self.inputs = []
        self.outputs = []
        self.variables = []
        self.derived = []
        self.batch = batch
        self.length = length
        self.leaves = {}
        self.layer_outputs = []
        self.returned = set()
        self.dropped = []
        self.is_again = False

    @functools.cached_property
    def lengths(self):
        """The dims that grow with the length, but not by it alone.

        A dict of `(index of a value, dim)` to `(times, rest)`, for a size of
        `times * length + rest`.
        """
        return lengths.find(self, self.length)

    @functools.cached_property
    def batches(self):
        """The dims that grow with the batch, but not by it alone.

        As `lengths`.
        """
        return lengths.find(self, self.batch)

    def new_value(self, kind, shape, dtype, path="", trainable=False):
        """Adds a `Value` and returns it."""
        value = Value(len(self.values), kind, shape, dtype, path, trainable)
        self.values.append(value)
        return value

    def in_order_of_use(self):
        """Returns `variables` in the order of first use; unused ones last."""
        first = {}
        for k, step in enumerate(self.steps):
            for value in (*step.inputs, *step.variables):
                first.setdefault(value.index, k)
        never = len(self.steps)
        return sorted(self.variables, key=lambda v: first.get(v.index, never))

    def __repr__(self):
        return (
            f"<Graph of {self.name!r}: {len(self.steps)} steps, "
            f"{len(self.variables)} variables>"
        )


def natural(path):
    """Returns a sort key of a path: `layer_2` comes before `layer_10`."""
    parts = re.split(r"(\d+)", path)
    return [int(p) if p.isdigit() else p for p in parts]


def values_in(structure):
    """Returns the list of `Value`s in a structure."""
    return [v for v in tree.flatten(structure) if isinstance(v, Value)]
