"""Estimates what the forward pass keeps for the backward pass.

The rules are those of XLA's programs for GPUs, as `benchmarks/activations.py`
shows. They store the inputs of products, convolutions and attention.
Elementwise results are computed again beside the operation that needs them,
from values that are stored.
"""

import collections
import math

from keras_tp.distribution.planning import attention
from keras_tp.distribution.planning import cost
from keras_tp.distribution.planning.graph import CONSTANT
from keras_tp.distribution.planning.graph import VARIABLE

# Operations whose inputs are stored.
_STORES_INPUTS = {
    *attention.PRODUCTS,
    attention.KERNEL,
    "Conv",
    "ConvTranspose",
    "DepthwiseConv",
    "SeparableConv",
}
# Other operations whose inputs or outputs the backward pass needs.
_NEEDS_INPUTS = {
    "Multiply",
    "LayerNorm",
    "RMSNorm",
    "BatchNorm",
    "Gelu",
    "Silu",
    "Square",
}
_NEEDS_OUTPUTS = {"Softmax", "Relu", "ReLU", "Sigmoid", "Tanh", "Exp", "Rsqrt"}
_GELU = "Gelu"
_SOFTMAX = "Softmax"
_LOOKUP = "Take"
_CAST = "Cast"
# Operations that change the layout or the dtype of a variable.
_OF_ONE = {_CAST, "ConvertToTensor", "Reshape", "Transpose"}
# The batch size and length at which parts that are computed again are compared.
_COMPARED_AT = 1, 1024
# The part of the graph behind the last one that is computed again.
_AFTER = -1


def kept(graph, split_dim, count, sums=(), gathered=()):
    """Estimates the bytes that the forward pass keeps for the backward pass.

    They include the logits, the kernels in the compute dtype, and the gradients
    of tables: zeros, to which those of rows are added. With rematerialization,
    they include what the largest part that is computed again keeps meanwhile.

    Args:
        graph: `Graph`.
        split_dim: Function of a `Value` that returns its split dim, or `None`.
        count: Int, number of devices along the axis that splits variables.
        sums: Iterable of `Value`, the sums over the devices in the forward
            pass. Rematerialization does not repeat them. Defaults to `()`.
        gathered: Collection of the paths of variables that the backward pass
            gathers again, so it stores no copies. Defaults to `()`.

    Returns:
        List of `Size` in bytes on one device, one for each way to grow.
    """
    stored = _Stored(graph, split_dim, count)
    for step in graph.steps:
        if step.kind in _STORES_INPUTS:
            stored.add(stored.factors(step))
            stored.add_copies(step, gathered)
        elif step.is_leaf and step.kind != _SOFTMAX:
            stored.add([*step.inputs, *step.outputs])
    for step in graph.steps:
        if step.kind in _NEEDS_INPUTS:
            stored.need(stored.factors(step))
        if step.kind in _NEEDS_OUTPUTS:
            stored.need(step.outputs)
        if step.kind == _GELU:
            # The tangent, or the error function and its derivative.
            times = 1 if step.operation.approximate else 2
            stored.add_like(step.outputs[0], times)
        if step.kind == _LOOKUP:
            stored.add_table(step.inputs[0])
    stored.add(graph.outputs)
    stored.add_dropped()
    stored.add_scores()
    stored.add_sums(sums)
    return stored.sizes()


class _Stored:
    """What is stored.

    Args:
        graph: `Graph`.
        split_dim: As in `kept`.
        count: As in `kept`.
    """

    def __init__(self, graph, split_dim, count):
        self._graph, self._split_dim, self._count = graph, split_dim, count
        self._made_by, self._read_by = {}, collections.defaultdict(list)
        self._learns = {v.index for v in graph.variables if v.trainable}
        for step in graph.steps:
            learns = any(v.index in self._learns for v in step.inputs)
            for value in step.outputs:
                self._made_by[value.index] = step
                if (learns or step.is_leaf) and "int" not in value.dtype:
                    self._learns.add(value.index)
            for value in step.inputs:
                self._read_by[value.index].append(step)
        self._scores = attention.find(
            graph, self._made_by, self._read_by, self._learns
        )
        self._inside = set().union(*(found.inside for found in self._scores))
        # Values by their index; tuples of a `Size`, the number of its parts
        # and the part of the graph that is computed again, or `None`.
        self._values, self._others, self._casts = {}, [], {}
        # Indices of the values that are stored while the part of the graph
        # that makes them is not computed again.
        self._always, self._copied = set(), set()
        again = [step.again is not None for step in graph.steps]
        self._after = set()
        if any(again):
            last = len(again) - again[::-1].index(True)
            self._after = {id(step) for step in graph.steps[last:]}
            for step in graph.steps:
                self._add_inputs(step)

    def factors(self, step):
        """Returns the inputs that the gradients of a step need."""
        inputs = step.inputs
        if len(inputs) < 2 or step.is_leaf:
            return inputs
        return [
            value
            for value in inputs
            if inputs.count(value) > 1
            or any(x.index in self._learns for x in inputs if x is not value)
        ]

    def add(self, values):
        """Stores values."""
        for value in values:
            if self._is_stored(value):
                value = self._first_cast(value)
                self._values[value.index] = value

    def need(self, values):
        """Stores values, or smaller ones from which they follow."""
        for value in values:
            value = self._first_cast(value)
            if not self._is_stored(value) or value.index in self._values:
                continue
            roots = {
                root.index: root
                for root in self._roots(value)
                if root.index not in self._values
            }
            if sum(map(self._bytes, roots.values())) > self._bytes(value):
                roots = {value.index: value}
            self._values.update(roots)

    def add_copies(self, step, gathered):
        """Stores the variables that a product casts to the compute dtype."""
        item = self._item(step.outputs[0])
        for value in step.inputs:
            variable = self._variable_of(value)
            if variable is None or variable.path in gathered:
                continue
            is_known = (variable.index, step.again) in self._copied
            if cost.item_bytes(variable.dtype) > item and not is_known:
                self._copied.add((variable.index, step.again))
                size = cost.Size(math.prod(variable.shape) * item, 0, 0)
                again = self._again_of(step)
                self._others.append((size, self._parts(variable), again))

    def add_table(self, value):
        """Stores the zeros to which gradients of rows are added."""
        variable = self._variable_of(value)
        if variable is not None and variable.trainable:
            size = cost.Size(variable.nbytes, 0, 0)
            self._others.append((size, self._parts(variable), None))

    def add_like(self, value, times):
        """Stores so many times the bytes of a value."""
        if self._grows(value):
            size = self._size(value)
            size = size._replace(coefficient=int(size.coefficient * times))
            again = self._again(value)
            self._others.append((size, self._parts(value), again))

    def add_dropped(self):
        """Stores a byte for each number that `Dropout` may drop."""
        for value in self._graph.dropped:
            if value.index not in self._inside:
                self.add_like(value, 1 / cost.item_bytes(value.dtype))

    def add_scores(self):
        """Stores scores of attention that is not one kernel."""
        for found in self._scores:
            if found.nbytes:
                size = cost.size_of_dims(found.dims, found.nbytes, self._graph)
                parts = self._parts(found.value)
                again = self._again_of(found.step)
                self._others.append((size, parts, again))

    def add_sums(self, sums):
        """Stores the sums that rematerialization needs.

        If the whole model is computed again, these are all sums. Else they are
        those from which something that is stored follows.
        """
        sums = {v.index: v for v in sums if self._is_again(v)}
        needed = sums if self._graph.is_again else {}
        left = [v for v in self._values.values() if self._is_again(v)]
        seen = set()
        while left and needed is not sums:
            value = left.pop()
            if value.index in seen or value.index in self._always:
                continue
            seen.add(value.index)
            if value.index in sums:
                needed[value.index] = value
            elif (step := self._made_by.get(value.index)) is not None:
                if step.again is not None:
                    left += step.inputs
        self._always |= needed.keys()
        self.add(needed.values())

    def sizes(self):
        """Returns the list of `Size` of `kept`."""
        entries = [
            (self._size(value), self._parts(value), self._again(value))
            for value in self._values.values()
        ]
        found = collections.defaultdict(collections.Counter)
        for (coefficient, *growth), parts, again in entries + self._others:
            found[again][tuple(growth)] += coefficient // parts
        total = found.pop(None, collections.Counter())
        if found:
            total += max(found.values(), key=_bytes_of)
        return [cost.Size(total[key], *key) for key in sorted(total)]

    def _add_inputs(self, step):
        """Stores what a step that is computed again reads from before.

        What it makes for a step behind it may be stored for that one.
        """
        for value in step.inputs:
            made_by = self._made_by.get(value.index)
            before = None if made_by is None else made_by.again
            if before != step.again and self._grows(value):
                self._always.add(value.index)
                if step.again is not None:
                    self._values[value.index] = value

    def _again(self, value):
        """Returns the part of the graph that makes a value in turn."""
        step = self._made_by.get(value.index)
        if step is None or value.index in self._always:
            return None
        return self._again_of(step)

    def _again_of(self, step):
        """Returns the part of the graph that holds what a step stores.

        A part that is computed again stores nothing until then. By then, what
        the steps behind all such parts have stored is not needed any more.
        """
        return _AFTER if id(step) in self._after else step.again

    def _first_cast(self, value):
        """Returns the first one of several casts that are the same."""
        step = self._made_by.get(value.index)
        if step is None or step.kind != _CAST:
            return value
        key = step.inputs[0].index, value.dtype, step.again
        return self._casts.setdefault(key, value)

    def _is_again(self, value):
        return self._again(value) not in (None, _AFTER)

    def _variable_of(self, value):
        """Returns the variable that a value is a copy of, or `None`."""
        while value.kind != VARIABLE:
            step = self._made_by.get(value.index)
            if step is None or step.kind not in _OF_ONE:
                return None
            value = step.inputs[0]
        return value

    def _roots(self, value):
        """Returns the values that are stored, from which a value follows."""
        found, left, seen = [], [value], set()
        while left:
            value = left.pop()
            if value.index in seen:
                continue
            seen.add(value.index)
            step = self._made_by.get(value.index)
            inputs = self._repeated(value, step)
            left += inputs
            if not inputs:
                found.append(value)
        return found

    def _repeated(self, value, step):
        """Returns from what a value is computed again, or an empty list."""
        if value.index in self._values or step is None:
            return []
        inputs = [x for x in step.inputs if self._grows(x)]
        # The stream of residual blocks is read by the next one, too.
        is_stream = len(self._read_by[value.index]) > 1 and len(inputs) > 1
        return inputs if attention.is_again(step) and not is_stream else []

    def _is_stored(self, value):
        """Returns whether a value is stored if the backward pass needs it.

        Masks are computed again, or the same in all layers.
        """
        is_mask = "float" not in value.dtype
        return (
            self._grows(value)
            and value.index not in self._inside
            and not is_mask
        )

    def _grows(self, value):
        """Returns whether a value is an activation: it depends on inputs."""
        if value.kind in (VARIABLE, CONSTANT):
            return False
        return cost.size_of(value, self._graph).batch > 0

    def _size(self, value):
        """Returns the `Size` of a value.

        A product with a table that is not cast is of float32 in a symbolic call
        and of the compute dtype in a train step.
        """
        size = cost.size_of(value, self._graph)
        item = self._item(value)
        if item == cost.item_bytes(value.dtype):
            return size
        coefficient = size.coefficient * item // cost.item_bytes(value.dtype)
        return size._replace(coefficient=coefficient)

    def _item(self, value):
        step, item = (
            self._made_by.get(value.index),
            cost.item_bytes(value.dtype),
        )
        if step is None or step.kind not in attention.PRODUCTS:
            return item
        read = [cost.item_bytes(x.dtype) for x in step.inputs if self._grows(x)]
        return min([item, *read])

    def _bytes(self, value):
        return value.nbytes // self._parts(value)

    def _parts(self, value):
        return 1 if self._split_dim(value) is None else self._count


def _bytes_of(sizes):
    return sum(
        cost.Size(coefficient, *growth).at(*_COMPARED_AT)
        for growth, coefficient in sizes.items()
    )
