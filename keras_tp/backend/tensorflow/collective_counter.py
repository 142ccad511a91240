"""Counts the collectives of an executed step in the graphs of one device."""

import itertools
import math

import tensorflow as tf
from keras.src import tree
from keras.src.distribution.distribution_lib import distribution
from tensorflow.experimental import dtensor
from tensorflow.python.eager import context

from keras_tp.backend.processes import data_shards
from keras_tp.backend.tensorflow import placement
from keras_tp.backend.tensorflow import training
from keras_tp.backend.tensorflow import variables

_runs = itertools.count()
_NAMES = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "collective_permute",
)
_OPS = {
    "CollectiveReduce": "all_reduce",
    "CollectiveGather": "all_gather",
    "CollectiveReduceScatter": "reduce_scatter",
    "CollectiveAllToAll": "all_to_all",
    "CollectivePermute": "collective_permute",
}
# DTensor names a node after its purpose. If a device lacks the collective, as
# CPUs lack a gather, DTensor all-reduces padded parts instead. The node counts
# as its purpose.
_PURPOSES = {
    "DTensorAllReduce": "all_reduce",
    "DTensorAllGather": "all_gather",
    "DTensorReduceScatter": "reduce_scatter",
    "DTensorAllScatter": "all_gather",
    "DTensorAllToAll": "all_to_all",
}


def count_step(model, x, y=None):
    """Runs one step of a model and counts its collectives.

    Restores all state afterwards.

    Args:
        model: A Keras model whose distribution is the current one.
        x: Inputs of one batch.
        y: Targets of the batch. Defaults to `None`: a predict step.

    Returns:
        Dict of collective name to `(count, bytes)`.
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
        if y is None:
            step = model.predict_step
            if not all(layer.built for layer in model._flatten_layers()):
                model._symbolic_build(data_batch=data)
        else:
            step = model.train_step
            model._symbolic_build(data_batch=data)
        with _state_kept(model):
            return count(_executed_graphs(model, step, data))
    finally:
        model.run_eagerly = eagerly


class _state_kept:
    """Restores the values of all distributed variables."""

    def __init__(self, model):
        self._kept = []
        state = [*model.variables, *model.metrics_variables]
        if getattr(model, "optimizer", None) is not None:
            state += model.optimizer.variables
        self._state = [v for v in state if variables.is_distributed(v)]

    def __enter__(self):
        # Shares the memory of the variable until an assignment.
        self._kept = [v._value.read_value() for v in self._state]

    def __exit__(self, *unused):
        for variable, value in zip(self._state, self._kept):
            mesh = dtensor.fetch_layout(value).mesh
            with dtensor.default_mesh(mesh):
                variable._value.assign(value)


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
        tree.map_structure(placement.to_host, run(data))
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

    Args:
        graphs: List of `GraphDef` from run metadata.

    Returns:
        Dict of collective name to `(count, bytes)`, with the size of the
        results on one device.
    """
    by_device = {}
    for graph in graphs:
        nodes = list(graph.node)
        for function in graph.library.function:
            nodes += function.node_def
        for node in nodes:
            name = _kind(node)
            if name is not None:
                device = by_device.setdefault(node.device, {})
                pair = device.setdefault(name, [0, 0])
                pair[0] += 1
                pair[1] += _bytes(node)
    total = {name: [0, 0] for name in _NAMES}
    if by_device:
        total.update(by_device[min(by_device)])
    return {name: tuple(pair) for name, pair in total.items()}


def _kind(node):
    for op, name in _OPS.items():
        # An operation may have a version in its name.
        if node.op in (op, op + "V2", op + "V3"):
            for purpose, meant in _PURPOSES.items():
                if purpose in node.name.split("/")[-1]:
                    return meant
            return name
    return None


def _bytes(node):
    shapes = node.attr["_output_shapes"].list.shape
    size = tf.as_dtype(node.attr["T"].type).size
    return sum(
        math.prod(dim.size for dim in shape.dim) * size for shape in shapes
    )
