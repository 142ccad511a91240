"""Rules: the dims of an operation that are split together, and the cost.

A rule is a function of `dims` and `step`. It records in a `Dims` how the
operation relates the dims of its inputs and outputs. It does not depend on the
mesh or the model. The rules themselves are in `rules_*.py`.
"""

import math

from keras import Layer
from keras import Operation

# (is_leaf, class or name of the class) -> rule.
_RULES = {}


def register_rule(cls):
    """Registers a planning rule for an operation or a layer.

    The planner does not trace through a layer with a rule: the rule describes
    the whole layer. Register it before the plan is made.

    Example:

    ```python
    @register_rule(Scale)
    def scale(dims, step):
        x, output = step.inputs[0], step.outputs[0]
        dims.elementwise([x], output)
        # The variable is split with the last dim of the output.
        dims.same(step.variables[0], 0, output, -1)
    ```

    Args:
        cls: Class, a subclass of `keras.Layer` or `keras.Operation`. The rule
            does not apply to its subclasses.

    Returns:
        A decorator for a function of a `Dims` and a `Step`. The `inputs`,
        `outputs` and `variables` (of a layer) of a step are lists of symbolic
        tensors with a `shape`; its `operation` is the layer or operation.

    Raises:
        ValueError: if `cls` is not such a class.
    """
    if not isinstance(cls, type) or not issubclass(cls, Operation):
        raise ValueError(
            "`register_rule` takes a subclass of `keras.Layer` or "
            f"`keras.Operation`. Received: cls={cls}"
        )

    def register(function):
        _RULES[issubclass(cls, Layer), cls] = function
        return function

    return register


def rule(*names):
    """Registers a rule for Keras operations with these class names."""
    return _register_names(False, names)


def leaf_rule(*names):
    """Registers a rule for leaves: layers with these class names."""
    return _register_names(True, names)


def _register_names(is_leaf, names):
    def register(function):
        for name in names:
            _RULES[is_leaf, name] = function
        return function

    return register


# Layers whose `call` runs on symbolic tensors on some backends or on none. They
# are leaves on every backend, so that plans do not depend on the backend.
LEAVES = {
    "RNN",
    "LSTM",
    "GRU",
    "SimpleRNN",
    "ConvLSTM1D",
    "ConvLSTM2D",
    "ConvLSTM3D",
    "Softmax",
    "ComputeAttentionMask",
    "DisentangledSelfAttention",
    "SAM3Attention",
    "SAM3GeometryEncoder",
}
_CONVOLUTIONS = ("Conv1D", "Conv2D", "Conv3D")


def is_leaf(layer):
    """Returns whether a layer is never traced through."""
    name = type(layer).__name__
    if name in _CONVOLUTIONS:
        # Grouped convolutions call the backend's function directly.
        return layer.groups > 1
    return name in LEAVES or (True, type(layer)) in _RULES


def rule_for(step):
    """Returns the rule of a `Step`, or `None`."""
    cls = type(step.operation)
    own = _RULES.get((step.is_leaf, cls))
    return own or _RULES.get((step.is_leaf, cls.__name__))


class Partial:
    """A tensor that splitting a dim turns into a partial sum per device.

    Args:
        node: Pair of ints, the index of a value and its dim that is split.
        tensor: `Value` that has to be summed over the devices.
        backward: Boolean. Whether the gradient of `tensor` is summed instead.
        step: `Step` that causes the sum.
    """

    def __init__(self, node, tensor, backward, step):
        self.node = node
        self.tensor = tensor
        self.backward = backward
        self.step = step


class Dims:
    """Collects the relations between the dims of all tensors of a graph.

    A rule calls its methods. Dims may be negative, except in `reshaped`. Dims
    of size 1 are never split: `same`, `keep` and `partial` ignore them.

    Args:
        graph: `Graph`.

    Attributes:
        whole: Dict of node (index of a value, dim) to why it is not split.
        partials: List of `Partial`.
        heads: Set of nodes that count attention heads.
        repeats: List of pairs of a node and a `Partial`: the KV heads, and
            the sum that splitting the query heads causes if they stay whole.
        factors: List of `(flat, major, minor)` nodes of a reshape.
        blocks: List of `(fused, part, count, is_split)`: the dim `fused`
            consists of `count` blocks of the dim `part`; see `block`.
        gathers: List of pairs of a node and the `Value` that is gathered if
            the node is split.
        in_loops: Set of the indices of variables that each time step uses.
        states: List of pairs of a node and the `Value` of all states of a
            loop. If the node is split, each time step gathers the state before.
    """

    def __init__(self, graph):
        self.graph = graph
        self.whole = {}
        self.partials = []
        self.heads = set()
        self.repeats = []
        self.factors = []
        self.blocks = []
        self.gathers = []
        self.in_loops = set()
        self.states = []
        # Indices of values computed from weights alone.
        self.weights = set()
        self._add_weights(
            v for v in graph.values if v.kind in ("variable", "constant")
        )
        # Indices of attention probabilities.
        self.probabilities = set()
        self.unknown = {}
        self._parent = {}
        self._step = None
        for step in graph.steps:
            self._apply(step)
        self.keep_whole(graph.inputs, "data")
        used = {id(v) for s in graph.steps for v in s.inputs + s.variables}
        for value, kernel_dims, kernel in graph.derived:
            # The trace computes as if unquantized, without scales.
            used.add(id(value))
            for i, dim in enumerate(kernel_dims):
                if dim is None:
                    self.keep(value, i, "no dim of its kernel")
                elif value.shape[i] > 1:
                    self.join((value.index, i), (kernel.index, dim))
        self.keep_whole(
            [value for value in graph.variables if id(value) not in used],
            "not in the forward pass that was traced",
        )

    def same(self, a, i, b, j):
        """Dim `i` of `a` and dim `j` of `b` are split together."""
        if a.shape[i] == b.shape[j] and a.shape[i] > 1:
            self.join((a.index, i % a.ndim), (b.index, j % b.ndim))

    def elementwise(self, inputs, output):
        """The inputs are broadcast to the output."""
        for x in inputs:
            offset = output.ndim - x.ndim
            for i in range(x.ndim):
                if i + offset >= 0:
                    self.same(x, i, output, i + offset)
            self._broadcast(x, offset, output)
            if x.index in self.probabilities and x.shape == output.shape:
                self.probabilities.add(output.index)

    def _broadcast(self, x, offset, output):
        """The gradient of `x` is a sum over the dims that `x` lacks.

        If the devices share such a dim, they have to add up their parts. An
        example is the scale of a normalization, where heads are split.
        """
        kinds = {
            str(value.dtype).startswith(("float", "bfloat"))
            for value in (x, output)
        }
        if kinds != {True}:
            return
        for i in range(output.ndim):
            if i < offset or x.shape[i - offset] == 1:
                self.partial(output, i, x, backward=True)

    def keep(self, value, i, why):
        """Dim `i` is never split."""
        if value.shape[i] > 1:
            node = (value.index, i % value.ndim)
            # The reason must not depend on the order of the steps.
            self.whole[node] = min(why, self.whole.get(node, why))

    def keep_whole(self, values, why):
        """No dim of these values is ever split."""
        for value in values:
            for i in range(value.ndim):
                self.keep(value, i, why)

    def partial(self, value, i, tensor, backward=False):
        """Splitting dim `i` of `value` makes `tensor` a partial sum.

        Args:
            value: `Value`.
            i: Int, its dim.
            tensor: `Value` that is summed over the devices (an all-reduce).
            backward: Boolean. Whether the gradient of `tensor` is summed
                instead. Defaults to `False`.
        """
        if value.shape[i] > 1:
            node = (value.index, i % value.ndim)
            self.partials.append(Partial(node, tensor, backward, self._step))

    def gather(self, value, i):
        """If dim `i` of `value` is split, the devices gather `value`."""
        self.gathers.append(((value.index, i), value))

    def head(self, value, i):
        """Dim `i` counts heads; if it is barred, their variables stay whole."""
        self.heads.add((value.index, i % value.ndim))

    def repeated(self, few, i, many, j):
        """The heads of dim `i` of `few` are repeated to dim `j` of `many`."""
        node = (many.index, j % many.ndim)
        sum_of_few = Partial(node, few, True, self._step)
        if few.shape[i] > 1:
            self.repeats.append(((few.index, i % few.ndim), sum_of_few))
        else:
            self.partials.append(sum_of_few)

    def reshaped(self, flat, i, parts, major, minor):
        """Dim `i` of `flat` is made of dims `major` and `minor` of `parts`."""
        self.factors.append(
            ((flat.index, i), (parts.index, major), (parts.index, minor))
        )

    def block(self, fused, i, part, j, count, is_split):
        """Dim `i` of `fused` consists of `count` blocks, one after the other.

        Args:
            fused: `Value`.
            i: Int, its dim.
            part: `Value` with one of the blocks.
            j: Int, its dim.
            count: Int.
            is_split: Boolean. Whether the operation splits `fused` into parts;
                if not, it joins parts to `fused`.
        """
        self.blocks.append(
            (
                (fused.index, i % fused.ndim),
                (part.index, j % part.ndim),
                count,
                is_split,
            )
        )

    def is_weight(self, value):
        """Returns whether a value depends on weights and constants alone."""
        return value.index in self.weights

    def size(self, node):
        return self.graph.values[node[0]].shape[node[1]]

    def find(self, node):
        """Returns the node that represents the class of a node."""
        parent = self._parent
        root = node
        while parent.get(root, root) != root:
            root = parent[root]
        while parent.get(node, node) != root:
            parent[node], node = root, parent[node]
        return root

    def join(self, a, b):
        a, b = self.find(a), self.find(b)
        # The smaller node: the result must not depend on the order.
        self._parent[max(a, b)] = min(a, b)

    def _add_weights(self, values):
        """Adds values without a batch dim; learned queries may gain one."""
        self.weights.update(
            v.index for v in values if self.graph.batch not in v.shape
        )

    def _apply(self, step):
        self._step = step
        around = [*step.inputs, *step.outputs, *step.variables]
        if not step.is_leaf and all(map(self.is_weight, step.inputs)):
            self._add_weights(step.outputs)
            if not all(map(self.is_weight, step.outputs)):
                few = [v for v in step.inputs if v.kind == "variable"]
                self.keep_whole(few, "the same for all examples")
        function = rule_for(step)
        if function is None:
            if any(math.prod(value.shape) > 1 for value in around):
                first = self.unknown.get(step.kind, step.path)
                self.unknown[step.kind] = min(step.path, first)
            self.keep_whole(around, f"{step.kind} has no rule")
        else:
            function(self, step)
