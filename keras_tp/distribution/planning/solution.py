"""The result of the solver: a choice for each variable, and collectives."""

import collections


class Choice(
    collections.namedtuple("Choice", ["dim", "blocks", "why", "obstacles"])
):
    """How one variable is split, and why.

    Args:
        dim: Int, the dim that is split, or `None`.
        blocks: Int, number of blocks in the split dim, such as 3 for a fused
            projection to queries, keys and values. Each device holds a part
            of each block.
        why: String, the reason for the choice.
        obstacles: List with a string for each dim: why it cannot be split, or
            an empty string.
    """


class Gather(
    collections.namedtuple("Gather", ["path", "tensor", "dim", "is_scattered"])
):
    """The output of a layer that is gathered.

    Args:
        path: String, path of the layer.
        tensor: `Value`, the whole output.
        dim: Int, the dim that is split before; `None` if parts of it are not
            of one size, or not in one piece.
        is_scattered: Boolean. Whether its gradient is reduce-scattered.
    """


class Solution:
    """The outcome for a graph and a number of devices.

    Attributes:
        choices: Dict of variable path to `Choice`.
        reductions: List of `Reduction`, in the order of the steps that cause
            them.
        split_dim: Function of a `Value` that returns its split dim, or `None`.
        gathers: List of `Gather`.
        unknown: Dict of each kind of step without a rule to the path of its
            first layer.
        graph: The `Graph` of these choices, in which some steps gather.
        streams: `sequence.Streams`, the activations that are split along the
            sequence.
        inserted: Dict of the path of a layer to the gathers that were inserted
            after its calls.
    """

    def __init__(
        self, choices, reductions, split_dim, gathers, unknown, graph, streams
    ):
        self.choices = choices
        self.reductions = reductions
        self.split_dim = split_dim
        self.gathers = gathers
        self.unknown = unknown
        self.graph = graph
        self.streams = streams
        self.inserted = {}
