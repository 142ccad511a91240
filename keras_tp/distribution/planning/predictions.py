"""What a plan predicts for a training step, variable by variable."""

import collections

from keras_tp.distribution.planning import cost
from keras_tp.distribution.planning import fully_sharded
from keras_tp.distribution.planning import planner
from keras_tp.distribution.tensor_layout import axis_size


class Communication(
    collections.namedtuple("Communication", "path kind reason size parts")
):
    """One collective of a training step.

    Args:
        path: String, path of the layer or the variable that causes it.
        kind: String, such as `"all_reduce"`.
        reason: One of `"forward"`, `"backward"` and `"variable"`: a sum or a
            gather of activations, of their gradients, or of a variable or its
            gradient over the replicas of the model.
        size: `Size`, bytes.
        parts: Int. The result on one device is the size divided by this.
    """

    def at(self, batch, length):
        """Returns the bytes of the result on one device.

        Args:
            batch: Int, the batch size of one replica of the model.
            length: Int, the sequence length.
        """
        return self.size.at(batch, length) // self.parts


def communications(plan):
    """Returns a list with a `Communication` for each collective of a step.

    Args:
        plan: `ShardingPlan`.
    """
    batch = planner.batch_axis(plan.device_mesh)
    found = [
        Communication(row.path, kind, "variable", cost.Size(nbytes, 0, 0), 1)
        for row, kind, nbytes in fully_sharded.collectives(plan, batch)
    ]
    parts = axis_size(plan.device_mesh, plan.axis)

    def add(row, kind, is_backward):
        reason = "backward" if is_backward else "forward"
        over = parts if kind == "reduce_scatter" else 1
        found.append(Communication(row.path, kind, reason, row.size, over))

    for row in plan.reductions:
        if not row.scattered:
            add(row, "all_reduce", row.backward)
            continue
        # The two passes mirror each other.
        add(row, "reduce_scatter", row.backward)
        add(row, "all_gather", not row.backward)
    for row in plan.gathers:
        add(row, "all_gather", False)
        if row.is_scattered:
            add(row, "reduce_scatter", True)
    return found


def collectives(plan, batch_size, length):
    """Returns a dict of a collective's name to a `CollectiveCount`.

    Args:
        plan: `ShardingPlan`.
        batch_size: Int, the global batch size.
        length: Int, the sequence length, or `None`.
    """
    rows = communications(plan)
    batch = _batch(plan, [row.size for row in rows], batch_size, length)
    sizes = {"all_reduce": [], "all_gather": [], "reduce_scatter": []}
    for row in rows:
        sizes[row.kind].append(row.at(batch, length))
    return {
        kind: cost.CollectiveCount(len(found), sum(found))
        for kind, found in sizes.items()
        if found or kind == "all_reduce"
    }


def memory(plan, batch_size, length, optimizer, dtype=None):
    """Returns a dict of what a step holds on one device to bytes.

    Args:
        plan: `ShardingPlan`.
        batch_size: Int, the global batch size.
        length: Int, the sequence length, or `None`.
        optimizer: String, a key of `cost.SLOTS`.
        dtype: String, as `ShardingPlan.memory` takes it. Defaults to `None`.
    """
    if optimizer not in cost.SLOTS:
        raise ValueError(
            f"`optimizer` must be one of {sorted(cost.SLOTS)}. Received: "
            f"optimizer={optimizer!r}"
        )
    batch = _batch(plan, plan.activations, batch_size, length)
    sizes = {row: plan.device_bytes(row, dtype) for row in plan.variables}
    gradients = sum(n for row, n in sizes.items() if row.trainable)
    found = {
        "parameters": sum(sizes.values()),
        "gradients": gradients,
        "slots": gradients * cost.SLOTS[optimizer],
        "activations": sum(size.at(batch, length) for size in plan.activations),
    }
    axis = planner.batch_axis(plan.device_mesh)
    gathered = fully_sharded.gathered_bytes(sizes, axis, replicas(plan))
    if gathered:
        found["gathered"] = gathered
    return {**found, "total": sum(found.values())}


def replicas(plan):
    """Returns the number of replicas of the model on the mesh of a plan."""
    return axis_size(plan.device_mesh, planner.batch_axis(plan.device_mesh))


def _batch(plan, sizes, batch_size, length):
    """Returns the batch size of one replica; checks for a length."""
    if length is None and any(size.length for size in sizes):
        raise ValueError(
            f"The inputs of {plan.model_name!r} have unknown dims beside "
            "the batch: pass `sequence_length`. Received: "
            "sequence_length=None"
        )
    return batch_size // replicas(plan)
