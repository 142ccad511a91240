"""What the charts of a plan show, as data that its page computes with."""

import collections

from keras_tp.distribution.accelerators import ACCELERATORS
from keras_tp.distribution.planning import cost
from keras_tp.distribution.planning import folding
from keras_tp.distribution.planning import predictions

# The step that a page shows first, if none is given: the batch of one replica.
BATCH, LENGTH = 8, 1024
KINDS = ("all_reduce", "all_gather", "reduce_scatter")
PARTS = ("parameters", "gradients", "slots", "activations", "gathered")


class Step(
    collections.namedtuple("Step", "batch_size length optimizer target")
):
    """The training step that a page shows first.

    Args:
        batch_size: Int, the global batch size.
        length: Int, the sequence length, or `None`.
        optimizer: String, a key of `cost.SLOTS`.
        target: String, a key of `ACCELERATORS`, or `None`.
    """

    def __str__(self):
        length = f" x {self.length}" if self.length else ""
        return f"(batch {self.batch_size}{length}, {self.optimizer})"


def step_of(plan, batch_size, sequence_length, optimizer, target):
    """Returns a `Step`, with defaults in the place of `None`."""
    if target is not None and target not in ACCELERATORS:
        raise ValueError(
            f"`target` must be one of {list(ACCELERATORS)}, or `None`. "
            f"Received: target={target!r}"
        )
    if batch_size is None:
        batch_size = BATCH * predictions.replicas(plan)
    if sequence_length is None and plan.needs_sequence_length:
        sequence_length = LENGTH
    return Step(batch_size, sequence_length, optimizer, target)


class CommunicationRow(
    collections.namedtuple(
        "CommunicationRow", "label name times communications"
    )
):
    """The collectives of a layer, or of repeated layers together.

    Args:
        label: String, the paths of the layers.
        name: String, a short name.
        times: Int, number of layers.
        communications: List of `Communication`.
    """

    def totals(self, batch, length):
        """Returns a dict of kind to the bytes on one device."""
        found = dict.fromkeys(KINDS, 0)
        for row in self.communications:
            found[row.kind] += row.at(batch, length)
        return found


def communication_rows(plan, folds):
    """Returns a `CommunicationRow` for each layer that communicates."""
    places = {}
    for index, fold in enumerate(folds):
        for member in fold.members:
            for position, layer in enumerate(member):
                places.setdefault(layer.path, (index, position))
    found = {}
    for row in predictions.communications(plan):
        path = row.path
        if row.reason == "variable":
            path = path.rpartition("/")[0]
        # A sum of an operation that no layer has.
        found.setdefault(places.get(path, path), []).append(row)
    rows = []
    for index, fold in enumerate(folds):
        for position in range(len(fold.sample)):
            own = found.pop((index, position), None)
            if own:
                label = folding.span(fold.paths(position)) or plan.model_name
                name = folding.below(fold.sample[position].path, fold.prefix())
                name = name if fold.times > 1 and fold.prefix() else label
                rows.append(CommunicationRow(label, name, fold.times, own))
    for path, own in found.items():
        rows.append(CommunicationRow(path, path, 1, own))
    return rows


def data_of(plan, rows, step):
    """Returns the numbers that the script of a page computes with.

    Args:
        plan: `ShardingPlan`.
        rows: List of `CommunicationRow`.
        step: `Step`.
    """
    still = predictions.memory(plan, 0, 0, "adam")
    return {
        "batch": step.batch_size,
        "length": step.length,
        "optimizer": step.optimizer,
        "target": step.target,
        "replicas": predictions.replicas(plan),
        "parameters": still["parameters"],
        "gradients": still["gradients"],
        "gathered": still.get("gathered", 0),
        "slots": cost.SLOTS,
        "activations": _merged((size, 1) for size in plan.activations),
        "rows": [
            {
                kind: _merged(
                    (own.size, own.parts)
                    for own in row.communications
                    if own.kind == kind
                )
                for kind in KINDS
            }
            for row in rows
        ],
        "targets": {
            name: {"title": row.title, "memory": row.memory}
            for name, row in ACCELERATORS.items()
        },
    }


def _merged(pairs):
    """Returns lists of a `Size`'s fields, its parts, and how many are equal."""
    counted = collections.Counter((tuple(size), n) for size, n in pairs)
    return [[*size, n, times] for (size, n), times in counted.items()]
