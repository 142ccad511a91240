"""Finds the activations that sequence parallelism splits along the sequence.

They begin where a row-parallel product or lookup sums over the devices, pass
through normalizations, dropout, residual additions and the like, and end in
front of column-parallel products (Korthikanti et al. 2022, arXiv 2205.05198,
section 4.2.2). What an operation does to the dim is read from its rule.
"""

import collections

from keras_tp.distribution.planning import reasons
from keras_tp.distribution.planning.reductions import Reduction
from keras_tp.distribution.planning.rules import Dims
from keras_tp.distribution.planning.rules import rule_for

# The dim of a tensor of shape (batch, sequence, features).
SEQUENCE = 1
_RANK = 3
# The operations that backends gather for, or whose sum they scatter.
_PRODUCTS = ("Einsum", "Matmul")
_SUMS = (*_PRODUCTS, "Take")


class Streams(
    collections.namedtuple("Streams", "split whole kernels sums unpredicted")
):
    """The activations that are split along the sequence.

    Args:
        split: Set of the indices of these `Value`s.
        whole: Set of the indices of those that are gathered for a product.
        kernels: Set of the paths of the kernels around them.
        sums: List of pairs of the position of a step and a `Reduction`: the
            gradients of whole variables between them, of which each device
            has the part of its positions.
        unpredicted: Dict of path of a kernel to the operation that needs its
            output whole, for which backends gather.
    """


def find_none(planner, unsummed):
    """Returns `Streams` without any; see `find`."""
    return Streams(frozenset(), frozenset(), frozenset(), (), {})


def find(planner, unsummed):
    """Finds the activations that are split along the sequence.

    Args:
        planner: The planner of `solver`, after it has chosen.
        unsummed: Set of the indices of partials that are not summed.

    Returns:
        `Streams`.
    """
    search = _Search(planner, unsummed)
    for position, step in enumerate(planner.graph.steps):
        search.visit(step, position)
    return Streams(
        search.split,
        search.whole,
        search.kernels,
        list(search.sums.values()),
        search.unpredicted,
    )


class _Search:
    """One pass over the steps of a graph, in their order.

    Args:
        planner: The planner of `solver`.
        unsummed: Set of the indices of partials that are not summed.
    """

    def __init__(self, planner, unsummed):
        self._planner = planner
        self._relations = _Relations(planner)
        self._variables = {v.index: v for v in planner.graph.variables}
        self._forward, self._backward = {}, collections.defaultdict(set)
        for k, partial in enumerate(planner.dims.partials):
            root, _ = planner.class_of(partial.node)
            if root not in planner.classes_taken or k in unsummed:
                continue
            if partial.backward:
                self._backward[id(partial.step)].add(partial.tensor.index)
            else:
                self._forward[id(partial.step)] = partial.tensor
        self.split, self.whole, self.kernels = set(), set(), set()
        self.sums, self.unpredicted = {}, {}
        # Index of a split value -> the kernels whose sum it comes from.
        self._origins = {}

    def visit(self, step, position):
        total = self._forward.get(id(step))
        if total is not None:
            if (
                step.kind in _SUMS
                and self._may_be_split(total)
                and self._relations.keeps(step)
            ):
                paths = self._split_variables(step)
                self.kernels |= paths
                self._add(total, paths)
            return
        inputs = [v for v in step.inputs if v.index in self.split]
        if not inputs:
            return
        is_column = step.kind in _PRODUCTS and any(
            v.index in self._backward[id(step)] for v in inputs
        )
        if is_column and self._relations.keeps(step):
            self.whole.update(v.index for v in inputs)
            self.kernels |= self._split_variables(step)
            return
        origins = set().union(*(self._origins[v.index] for v in inputs))
        outputs, summed, split = self._relations.of(step, inputs)
        if not outputs or split or self._has_other(step, inputs):
            reader = f"{step.kind} in {step.path!r}"
            self.unpredicted |= dict.fromkeys(sorted(origins), reader)
        for value in outputs:
            self._add(value, origins)
        for value in summed:
            self._sum(value, step, position)

    def _add(self, value, origins):
        self.split.add(value.index)
        self._origins[value.index] = origins

    def _sum(self, value, step, position):
        """Adds the sum over the devices of the gradient of a variable."""
        variable = self._variables.get(self._planner.source(value))
        if variable is None or not variable.trainable:
            return
        if variable.index not in self.sums:
            reduction = Reduction(variable, True, step.path, step.kind, 1)
            self.sums[variable.index] = position, reduction

    def _has_other(self, step, inputs):
        """Returns whether a step combines a split activation with a whole one.

        The whole one would get a split gradient.
        """
        shapes = {v.shape for v in inputs}
        return any(
            v.shape in shapes
            and v.index not in self.split
            and not self._planner.dims.is_weight(v)
            and v.kind != "input"
            for v in step.inputs
        )

    def _split_variables(self, step):
        sources = {self._planner.source(v) for v in step.inputs}
        return {
            self._variables[index].path
            for index in sources & self._variables.keys()
            if self._planner.split_of(self._variables[index].path) is not None
        }

    def _may_be_split(self, value):
        graph = self._planner.graph
        # A `Sequential` that data has built knows the size of its batch.
        batches = {v.shape[0] for v in graph.inputs if v.ndim}
        if value.ndim != _RANK or value.shape[0] not in batches:
            return False
        size = value.shape[SEQUENCE]
        grows = size % graph.length == 0 and size
        grows = grows or (value.index, SEQUENCE) in graph.lengths
        return bool(grows) or size % self._planner.count == 0


class _Relations(Dims):
    """What the rule of one step says about the dim of the sequence."""

    def __init__(self, planner):
        self.graph = planner.graph
        self._known = planner.dims

    def of(self, step, inputs):
        """Returns what is split and summed if the inputs are split.

        Args:
            step: `Step`.
            inputs: List of `Value`, those of its inputs that are split.

        Returns:
            Three lists of `Value`, empty if the step needs an input whole: the
            outputs that are split, and the weights whose gradient is a sum over
            the devices, or is split as they have positions.
        """
        if not self._apply_alone(step):
            return [], [], []
        nodes = {self.find((value.index, SEQUENCE)) for value in inputs}
        if len(nodes) > 1 or self._is_whole(nodes):
            return [], [], []
        outputs = [
            value
            for value in step.outputs
            if value.ndim == _RANK
            and self.find((value.index, SEQUENCE)) in nodes
        ]
        if len(outputs) < len(step.outputs):
            return [], [], []
        weights = [v for v in step.inputs if self.is_weight(v)]
        weights += step.variables
        split = [v for v in weights if self._has(v, nodes)]
        return outputs, [v for v in weights if v not in split], split

    def _has(self, value, nodes):
        dims = range(value.ndim)
        return any(self.find((value.index, i)) in nodes for i in dims)

    def keeps(self, step):
        """Returns whether the output of a product has the dim of an input."""
        self._apply_alone(step)
        output = step.outputs[0]
        node = self.find((output.index, SEQUENCE))
        return any(
            x.ndim > SEQUENCE and self.find((x.index, SEQUENCE)) == node
            for x in step.inputs
            if not self.is_weight(x)
        )

    def _apply_alone(self, step):
        """Applies the rule of a step, if it has one; returns whether it has."""
        self._forget()
        self._step = step
        rule = rule_for(step)
        if rule is not None:
            rule(self, step)
        return rule is not None

    def _is_whole(self, nodes):
        forward = [p.node for p in self.partials if not p.backward]
        kept = [*self.whole, *forward, *(node for node, _ in self.gathers)]
        return any(self.find(node) in nodes for node in kept)

    def _forget(self):
        self.whole, self.unknown, self._parent = {}, {}, {}
        self.partials, self.repeats, self.factors = [], [], []
        self.blocks, self.gathers = [], []
        self.heads = set()
        self.weights = self._known.weights
        self.probabilities = self._known.probabilities


def why(text, path, streams):
    """Returns what a plan says of a kernel, beside split activations or not."""
    if path not in streams.kernels:
        return text
    text = text.replace(reasons.COLUMN, reasons.COLUMN_OF_SEQUENCE)
    text = text.replace(reasons.SUMMED, reasons.SCATTERED)
    reader = streams.unpredicted.get(path)
    return text + (reasons.NEEDED_WHOLE.format(reader) if reader else "")
