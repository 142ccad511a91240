"""Counts the collectives of an executed step in the graphs of one device."""

import contextlib
import itertools
import math
import re

import tensorflow as tf
from keras.src import tree
from keras.src.distribution.distribution_lib import distribution
from tensorflow.python.eager import context

from keras_tp.backend.processes import data_shards
from keras_tp.backend.tensorflow import functions
from keras_tp.backend.tensorflow import placement
from keras_tp.backend.tensorflow import training
from keras_tp.backend.tensorflow import variables
from keras_tp.backend.tensorflow.ops.sequence import SCATTERED

_runs = itertools.count()
_OPS = {
    "CollectiveReduce": "all_reduce",
    "CollectiveGather": "all_gather",
    "CollectiveReduceScatter": "reduce_scatter",
    "CollectiveAllToAll": "all_to_all",
    "CollectivePermute": "collective_permute",
}
# DTensor names a node after its purpose. If a device lacks the collective, as
# CPUs lack a gather, DTensor all-reduces padded parts instead. The node counts
# as its purpose; for a reduce-scatter see `_kept_parts`.
_PURPOSES = {
    "DTensorAllReduce": "all_reduce",
    "DTensorAllGather": "all_gather",
    "DTensorReduceScatter": "reduce_scatter",
    "DTensorAllScatter": "all_gather",
    "DTensorAllToAll": "all_to_all",
}


def count_step(model, x, y=None):
    """Runs one step of a model and counts its collectives.

    Restores all state afterwards. Without `y` it is a predict step.
    """
    data = tree.map_structure(
        lambda v: (
            v
            if v is None or data_shards.is_sparse(v)
            else tf.convert_to_tensor(v)
        ),
        (x,) if y is None else (x, y),
    )
    eagerly, model.run_eagerly = model.run_eagerly, False
    try:
        step = model.predict_step if y is None else model.train_step
        if y is not None or not functions.is_built(model):
            model._symbolic_build(data_batch=data)
        with _state_kept(model):
            return count(_executed_graphs(model, step, data))
    finally:
        model.run_eagerly = eagerly


@contextlib.contextmanager
def _state_kept(model):
    """Restores the values of all distributed variables."""
    state = [*model.variables, *model.metrics_variables]
    if getattr(model, "optimizer", None) is not None:
        state += model.optimizer.variables
    state = [v._value for v in state if variables.is_distributed(v)]
    # Shares the memory of the variable until an assignment.
    kept = [(value, value.read_value()) for value in state]
    try:
        yield
    finally:
        for value, before in kept:
            value.assign(before)


def _executed_graphs(model, step, data):
    if distribution() is None:
        # One device has no collectives.
        return []
    # A new function, because TensorFlow exports the graphs of a function only
    # when it instantiates them, on the first run.
    mark = f"keras_tp_counted_{next(_runs)}"

    def marked_step(batch):
        with tf.name_scope(mark):
            return step(batch)

    run = training.step_on_mesh(model, marked_step)
    context.async_wait()
    context.context().enable_run_metadata()
    try:
        placement.to_host(run(data))
        context.async_wait()
        metadata = context.context().export_run_metadata()
    finally:
        context.context().disable_run_metadata()
    # TensorFlow may have instantiated other functions meanwhile.
    return [
        graph
        for graph in metadata.partition_graphs
        if any(mark in node.name for node in graph.node)
    ]


def count(graphs):
    """Counts the collectives of one device among the graphs of all devices.

    Returns a dict of collective name to `(count, bytes)`, with the size of the
    results on one device.
    """
    by_device = {}
    for graph in graphs:
        nodes = list(graph.node)
        for function in graph.library.function:
            nodes += function.node_def
        parts = _kept_parts(nodes)
        for node in nodes:
            name, result = _kind(node), node
            if name == "all_reduce" and node.name in parts:
                name, result = "reduce_scatter", parts[node.name]
            if name is not None:
                device = by_device.setdefault(node.device, {})
                pair = device.setdefault(name, [0, 0])
                pair[0] += 1
                pair[1] += _bytes(result)
    total = {name: [0, 0] for name in _OPS.values()}
    if by_device:
        total.update(by_device[min(by_device)])
    return {name: tuple(pair) for name, pair in total.items()}


def _kept_parts(nodes):
    """Returns the slices that devices without a reduce-scatter make.

    Such devices all-reduce, and each one keeps its part of the sum: a slice
    that DTensor names after the sum. Only sums in the scope `SCATTERED` count;
    DTensor may fuse others with a slice, and count as they are sent.

    Returns:
        Dict of the name of a sum to the node of the slice.
    """
    return {
        node.input[0]: node
        for node in nodes
        if node.op == "Slice"
        and SCATTERED in node.name
        and _purpose(node.name).endswith("/DTensorAllReduceOp")
        and _purpose(node.name) == _purpose(node.input[0])
    }


def _purpose(name):
    """Returns the name of a node without the numbers DTensor appends."""
    return re.sub(r"(_\d+)+$", "", name)


def _kind(node):
    # An operation may have a version in its name.
    name = _OPS.get(re.sub(r"V\d$", "", node.op))
    for purpose, meant in _PURPOSES.items():
        if name is not None and purpose in node.name.split("/")[-1]:
            return meant
    return name


def _bytes(node):
    shapes = node.attr["_output_shapes"].list.shape
    size = tf.as_dtype(node.attr["T"].type).size
    return sum(
        math.prod(dim.size for dim in shape.dim) * size for shape in shapes
    )
