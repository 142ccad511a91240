"""Predicts what a fully sharded plan communicates: FSDP, or ZeRO-3.

A training step gathers each variable over the axis of the batch where it is
used, and reduce-scatters its gradient. The kernel of a product is gathered
again in the backward pass (Rajbhandari et al. 2020, arXiv 1910.02054, section
7.2.2), because the gradient of the product's input needs it.
"""

from keras_tp.distribution.tensor_layout import axis_size

# The operations whose kernel is gathered again.
_PRODUCTS = ("Einsum", "Matmul")


def gathered_again(graph):
    """Returns the paths of variables that the backward pass gathers again.

    Args:
        graph: `Graph`.
    """
    variables = {v.index: v.path for v in graph.variables}
    has_gradient = {v.index for v in graph.variables if v.trainable}
    found = set()
    for step in graph.steps:
        indices = [value.index for value in step.inputs]
        if step.kind == "Transpose" and indices[0] in variables:
            # A tied head multiplies by the transpose of the table.
            variables[step.outputs[0].index] = variables[indices[0]]
        elif step.kind in _PRODUCTS:
            for index in indices:
                others = [other for other in indices if other != index]
                if index in variables and has_gradient.intersection(others):
                    found.add(variables[index])
        used = {*indices, *(value.index for value in step.variables)}
        if has_gradient & used:
            has_gradient.update(value.index for value in step.outputs)
    return found


def is_split(row, axis):
    """Returns whether a `PlannedVariable` is split over a mesh axis."""
    return any(
        axis in (axes if isinstance(axes, tuple) else (axes,))
        for axes in row.axes
    )


def gathered_bytes(sizes, axis, count):
    """Returns the most bytes that a device holds of a gathered variable.

    A trainable one has a gradient of that size, before the reduce-scatter.

    Args:
        sizes: Dict of `PlannedVariable` to its bytes on one device.
        axis: String, the mesh axis of the batch, or `None`.
        count: Int, its size.
    """
    if count == 1:
        return 0
    return max(
        (
            size * count * (1 + row.trainable)
            for row, size in sizes.items()
            if is_split(row, axis)
        ),
        default=0,
    )


def collectives(plan, axis):
    """Yields the collectives of variables and gradients in a training step.

    Args:
        plan: `ShardingPlan`.
        axis: String, the mesh axis of the batch, or `None`.

    Yields:
        `(row, kind, nbytes)`: a `PlannedVariable`, a collective's name, and the
        bytes of its result on one device.
    """
    count = axis_size(plan.device_mesh, axis)
    for row in plan.variables if count > 1 else ():
        size, kind = plan.device_bytes(row), "all_reduce"
        if is_split(row, axis):
            kind = "reduce_scatter"
            for _ in range(1 + row.gathered_again):
                yield row, "all_gather", size * count
        if row.trainable:
            yield row, kind, size
