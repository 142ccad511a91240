"""Finds layers whose output is gathered, so that a kernel can be split.

What follows a layer may need its output whole, as a normalization does. Then
the layer's kernel can be split if the devices gather the output: one all-gather
in the forward pass (`gather_output` of Megatron-LM's `ColumnParallelLinear`).
In the backward pass each device takes its part of the gradient.

A kernel may also be whole because its layer gets a split input, such as several
split outputs that are concatenated. Then the layer before is gathered.
"""

import collections
import itertools

from keras import tree

from keras_tp.distribution.planning.graph import RESULT
from keras_tp.distribution.planning.graph import Graph
from keras_tp.distribution.planning.graph import Step
from keras_tp.distribution.planning.graph import Value
from keras_tp.distribution.planning.rules import rule

# A gather costs communication in every step, so outputs are gathered only until
# this share of the bytes of all matrices, kernels and embeddings is split.
ENOUGH_SPLIT = 0.9
# What a graph finds from its steps.
_OF_STEPS = ("lengths", "batches")


class GatherOutput(collections.namedtuple("GatherOutput", "dims kernels")):
    """The operation of a step that gathers dims of a layer's output.

    Args:
        dims: Tuple of ints.
        kernels: Tuple of the paths of the kernels that are split because of it.
    """


@rule("GatherOutput")
def gather_output(dims, step):
    """Splits all dims alike, except for those that are gathered."""
    x, output = step.inputs[0], step.outputs[0]
    for i in range(x.ndim):
        if i in step.operation.dims:
            dims.gather(x, i)
            dims.keep(output, i, "whole after a layer's output is gathered")
        else:
            dims.same(x, i, output, i)


def steps_of(graph):
    """Returns the steps of a graph that gather."""
    return [s for s in graph.steps if isinstance(s.operation, GatherOutput)]


def candidates(planner, least):
    """Finds the outputs that could be gathered to split another kernel.

    Args:
        planner: The planner of `solver`, after it has chosen.
        least: Int, the least bytes of such a kernel.

    Returns:
        Dict of the path of a layer to a list with a `GatherOutput` for each of
        its calls. Empty if enough is split.
    """
    if planner.count == 1 or _missing(planner) <= 0:
        return {}
    calls = collections.defaultdict(list)
    for path, _, value in planner.graph.layer_outputs:
        calls[path].append(value)
    before = _layers_before(planner)
    found = collections.defaultdict(list)
    for kernel in planner.by_path.values():
        path = kernel.path.rpartition("/")[0]
        is_large = kernel.ndim > 1 and kernel.nbytes >= least
        if not (is_large and path in calls and planner.is_whole(kernel.path)):
            continue
        found[path].append((kernel, _columns(planner, kernel)))
        if kernel.path in planner.disagreeing:
            classes = _classes(planner, kernel) & planner.classes_taken
            for layer in before.get(path, ()):
                found[layer].append((kernel, classes))
    made = {
        path: _of_calls(planner, calls[path], kernels)
        for path, kernels in found.items()
    }
    return {path: gathers for path, gathers in made.items() if gathers}


def _of_calls(planner, values, kernels):
    """Returns a `GatherOutput` for each output of a layer, or an empty list."""
    paths = tuple(kernel.path for kernel, _ in kernels)
    classes = set().union(*(classes for _, classes in kernels))
    dims = [_dims_of(planner, value, classes) for value in values]
    ranks = {value.ndim for value in values}
    if not all(dims) or len(ranks) > 1:
        return []
    return [GatherOutput(tuple(found), paths) for found in dims]


def _classes(planner, kernel):
    return {
        planner.class_of((kernel.index, i))[0]
        for i, size in enumerate(kernel.shape)
        if size > 1
    }


def _columns(planner, kernel):
    """Returns the classes of the dims of a kernel that its output has."""
    uses = [planner.is_column(kernel, i) for i in range(kernel.ndim)]
    if not any(uses):
        # A table that is sliced, not multiplied.
        return _classes(planner, kernel)
    return {
        planner.class_of((kernel.index, i))[0]
        for i in range(kernel.ndim)
        if uses[i]
    }


def _dims_of(planner, value, classes):
    """Returns the dims of a layer's output that are gathered."""
    # The batch, if there is one, has to be the first dim, which is not split.
    has_batch = value.ndim and value.shape[0] % planner.graph.batch == 0
    if not has_batch and not planner.dims.is_weight(value):
        return []
    return [
        i
        for i, size in enumerate(value.shape)
        if i and size > 1 and planner.class_of((value.index, i))[0] in classes
    ]


def _layers_before(planner):
    """Returns a dict: path of a layer -> paths of the layers that it reads.

    Outputs that are concatenated are gathered before: the devices then hold
    parts of each, and no part of the whole.
    """
    graph, is_weight = planner.graph, planner.dims.is_weight
    makers = {v.index: [path] for path, _, v in graph.layer_outputs}
    made_by = {v.index: path for path, _, v in graph.layer_outputs}

    def is_in_blocks(value):
        pairs = [(value.index, i) for i, n in enumerate(value.shape) if n > 1]
        return any(planner.class_of(pair)[1] > 1 for pair in pairs)

    found = {}
    for step in graph.steps:
        for value in step.inputs:
            if made_by.get(value.index, step.path) != step.path:
                found.setdefault(step.path, makers[value.index])
        inputs = [x for x in step.inputs if not is_weight(x)]
        if len(inputs) < 2 and not any(map(is_in_blocks, inputs)):
            continue
        before = [makers.get(x.index, []) for x in inputs]
        each = dict.fromkeys(itertools.chain(*before)) if all(before) else {}
        for value in filter(is_in_blocks, step.outputs):
            makers[value.index] = list(each)
    return found


def needed(planner):
    """Returns the paths of the layers whose output is worth a gather.

    The layers that save the most bytes for each byte that is gathered come
    first, until enough is split.

    Args:
        planner: The planner of `solver` for a graph of `inserted`.
    """
    kernels = _split_by_gathers(planner)
    sent = collections.Counter()
    for step in planner.gathering():
        sent[step.path] += planner.bytes_sent(step.outputs[0])

    def price(path):
        return sent[path] / _bytes(planner, kernels[path]), path

    left = set().union(*kernels.values())
    missing = _missing(planner) + _bytes(planner, left)
    found = set()
    for path in sorted(kernels, key=price):
        own = kernels[path] & left
        # A kernel may need the output of two layers gathered.
        if missing > 0 or not own:
            found.add(path)
            missing -= _bytes(planner, own)
            left -= own
    return found


def _split_by_gathers(planner):
    """Returns a dict of layers to the kernels that are split by their gather.

    The output of such a layer is gathered in each of its calls.
    """
    calls, kernels = collections.Counter(), {}
    for step in steps_of(planner.graph):
        calls[step.path] += 1
        kernels[step.path] = {
            path
            for path in step.operation.kernels
            if not planner.is_whole(path)
        }
    calls.subtract(step.path for step in planner.gathering())
    return {
        path: split
        for path, split in kernels.items()
        if split and not calls[path]
    }


def _bytes(planner, paths):
    return sum(planner.by_path[path].nbytes for path in paths)


def _missing(planner):
    """Returns the bytes of matrices that should be split and are not."""
    total = split = 0
    for variable in planner.by_path.values():
        if variable.ndim > 1:
            total += variable.nbytes
            if not planner.is_whole(variable.path):
                split += variable.nbytes
    return ENOUGH_SPLIT * total - split


def inserted(graph, gathers):
    """Returns a `Graph` with a step that gathers the output of some layers.

    Args:
        graph: `Graph`.
        gathers: Dict, as `candidates` returns it.
    """
    found = Graph(graph.name, graph.batch, graph.length)
    found.__dict__.update(
        {k: v for k, v in vars(graph).items() if k not in _OF_STEPS}
    )
    found.values, found.steps = list(graph.values), []
    left = {path: list(calls) for path, calls in gathers.items()}
    ends = collections.defaultdict(list)
    for path, position, value in graph.layer_outputs:
        if path in left:
            ends[position].append((path, value, left[path].pop(0)))
    whole_of = {}
    for k in range(len(graph.steps) + 1):
        for path, value, operation in ends[k]:
            whole = found.new_value(
                RESULT, value.shape, value.dtype, value.path
            )
            before = whole_of.get(value.index, value)
            found.steps.append(
                Step(operation, [before], {}, [whole], path, False, [])
            )
            whole_of[value.index] = whole
        if k < len(graph.steps):
            found.steps.append(_reading(graph.steps[k], whole_of))
    found.outputs = [whole_of.get(v.index, v) for v in graph.outputs]
    return found


def _reading(step, whole_of):
    """Returns a step that reads gathered values instead of split ones."""
    if not any(value.index in whole_of for value in step.inputs):
        return step
    args, kwargs = tree.map_structure(
        lambda x: whole_of.get(x.index, x) if isinstance(x, Value) else x,
        (step.args, step.kwargs),
    )
    return Step(
        *(step.operation, args, kwargs, step.outputs, step.path),
        *(step.is_leaf, step.variables, step.again),
    )
