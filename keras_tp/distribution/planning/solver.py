"""Chooses, for each variable of a graph, the dim that is split.

Dims that have to be split together form a class. A class is barred if one of
its dims is kept whole or does not divide. The solver takes the other classes in
order of cost: bytes of communication for each byte of parameters saved. This
order finds the pairs of a column and a row split (Megatron-LM, Shoeybi et al.
2019, section 3) without names of layers.
"""

import collections
import math

from keras_tp.distribution.planning import fused
from keras_tp.distribution.planning import gathers
from keras_tp.distribution.planning import reasons
from keras_tp.distribution.planning import reductions
from keras_tp.distribution.planning import sequence
from keras_tp.distribution.planning import uses
from keras_tp.distribution.planning.dim_groups import Classes
from keras_tp.distribution.planning.solution import Choice
from keras_tp.distribution.planning.solution import Gather
from keras_tp.distribution.planning.solution import Solution

# A split that no later operation sums over costs a gather, or splits outputs of
# the model. So it has to save this share of all parameters. In a deep model no
# layer is that large; there, this share of the largest variable is enough.
LONE_SHARE = 0.01
LONE_SHARE_OF_LARGEST = 0.5
# A class is skipped if less than this share of its bytes is still free.
BROKEN_SHARE = 0.5


def solve(
    graph,
    count,
    forced=None,
    uneven=True,
    in_blocks=True,
    gather_outputs=None,
    inserted=None,
    sequence_parallel=False,
):
    """Chooses a split for every variable of a graph.

    If less than `gathers.ENOUGH_SPLIT` of the matrices is split, because what
    follows their layers needs outputs whole, it chooses again, with the outputs
    of some of these layers gathered.

    Args:
        graph: `Graph`.
        count: Int, number of devices along the axis that splits variables.
        forced: Dict of path to the dim to split, or to `None` for a variable
            that stays whole. Defaults to `None`.
        uneven: Boolean. Whether a large dim may be split that `count` does not
            divide. Defaults to `True`.
        in_blocks: Boolean. Whether each block of a dim may be split. Defaults
            to `True`.
        gather_outputs: Int, the least bytes of a kernel for which the output
            of its layer may be gathered. Defaults to `None`: none is.
        inserted: Dict, the `Solution.inserted` of another solution for this
            graph: these outputs are gathered. Defaults to `None`.
        sequence_parallel: Boolean. Whether activations are split along the
            sequence where they can be. Defaults to `False`.

    Returns:
        A `Solution`.
    """
    arguments = count, dict(forced or {}), uneven, in_blocks, sequence_parallel
    planner = _Planner(graph, *arguments)
    solution = planner.solution()

    def gathering(found):
        more = gathers.inserted(graph, found)
        return _Planner(more, *arguments, without=planner)

    if inserted:
        return gathering(inserted).solution()
    found = {}
    if gather_outputs is not None:
        found = gathers.candidates(planner, gather_outputs)
    while found:
        other = gathering(found)
        more_split = other.solution()
        needed = gathers.needed(other)
        if needed == set(found):
            more_split.inserted = found
            return more_split
        found = {path: found[path] for path in found if path in needed}
    return solution


class _Planner(Classes):
    """Selects the classes to split, and makes a `Choice` per variable.

    Args:
        graph: `Graph`.
        count: Int, as for `solve`.
        forced: Dict, as for `solve`.
        uneven: Boolean, as for `solve`.
        in_blocks: Boolean, as for `solve`.
        sequence_parallel: Boolean, as for `solve`.
        without: The planner for the same graph without gathers, after it has
            chosen, if steps of this graph gather. A variable that is whole
            there stays whole, unless it is in the layer of a kernel for which
            an output is gathered.
    """

    def __init__(
        self,
        graph,
        count,
        forced,
        uneven,
        in_blocks,
        sequence_parallel=False,
        without=None,
    ):
        super().__init__(graph, count, uneven)
        self._sequence_parallel = sequence_parallel and count > 1
        self._splits_blocks = in_blocks
        self._without = without
        self.forced = forced
        self._kernels = {v.path: kernel for v, _, kernel in graph.derived}
        self._gathered_classes = {
            self.class_of(node)[0] for node, _ in self.dims.gathers
        }
        steps = gathers.steps_of(graph)
        self._gathered_layers = {step.path for step in steps}
        self._to_split = {k for step in steps for k in step.operation.kernels}
        self._sources = {}
        for step in graph.steps:
            if len(step.inputs) == 1 and self.dims.is_weight(step.inputs[0]):
                for value in step.outputs:
                    self._sources[value.index] = self.source(step.inputs[0])

    def solution(self):
        self.taken = {}
        self.classes_taken = set()
        self.in_blocks = {}
        self.classes_in_blocks = {}
        # Class -> why it is not split.
        self.skipped = {}
        if self.count > 1:
            self._take_forced()
            self._take_cheapest_first()
        not_summed, self.disagreeing = reductions.not_summed(self)
        choices = {path: self._choice(path) for path in self.by_path}
        if self._without is not None:
            # Variables that are whole in both keep their reasons.
            choices |= {
                path: self._without.choices[path]
                for path, choice in choices.items()
                if choice.dim is None
            }
        self.choices = choices
        find = sequence.find if self._sequence_parallel else sequence.find_none
        streams = find(self, not_summed)
        sums, scattered = reductions.of(self, not_summed, streams.sums)
        return Solution(
            choices,
            sums,
            self._split_dim,
            [self._gather(step, scattered) for step in self.gathering()],
            self.dims.unknown,
            self.graph,
            streams,
        )

    def _gather(self, step, scattered):
        before, tensor = step.inputs[0], step.outputs[0]
        dim = self._split_dim(before)
        _, blocks = self.class_of((before.index, dim))
        if blocks > 1 or before.shape[dim] % self.count:
            dim = None
        return Gather(step.path, tensor, dim, tensor.index in scattered)

    def gathering(self):
        """Returns the steps that gather a split output of a layer."""
        return [
            step
            for step in gathers.steps_of(self.graph)
            if self._split_dim(step.inputs[0]) is not None
            and self._split_dim(step.outputs[0]) is None
        ]

    def is_whole(self, path):
        """Returns whether a variable is whole, and not by the user's choice."""
        return self.split_of(path) is None and path not in self.forced

    def is_column(self, variable, dim):
        """Returns whether a split of a dim makes a kernel column-parallel."""
        return self._why_split(variable, dim).startswith(reasons.COLUMN)

    def _free_members(self, root):
        """Returns the members of a class that no other choice has fixed."""
        found = {}
        fixed = (self.taken, self.in_blocks, self.frozen, self.forced)
        for path, i, blocks in self.members[root]:
            if not any(path in paths for paths in fixed) and self._may_split(
                path, root
            ):
                found.setdefault(path, (i, blocks))
        return {p: v for p, v in found.items() if self._may_go(p, root, found)}

    def _may_split(self, path, root):
        """Returns whether gathers of outputs allow a split of a variable."""
        layer = path.rpartition("/")[0]
        if path in self._to_split and layer in self._gathered_layers:
            return root in self._gathered_classes
        return (
            self._without is None
            or not self._without.is_whole(path)
            or layer in {path.rpartition("/")[0] for path in self._to_split}
        )

    def _may_go(self, path, root, free):
        """Returns `False` if a variable follows a kernel that stays whole."""
        kernel = self._kernels.get(path)
        if kernel is None or kernel.path in free:
            return True
        dim = self.forced.get(kernel.path)
        return dim is not None and self.class_of((kernel.index, dim))[0] == root

    def _bytes(self, paths):
        return sum(self.by_path[path].nbytes for path in paths)

    def _take(self, root, free):
        self.classes_taken.add(root)
        self.taken.update(free)

    def _take_forced(self):
        for path, dim in self.forced.items():
            if dim is None:
                continue
            root, _ = self.class_of((self.by_path[path].index, dim))
            if root in self.members:
                self._take(root, self._free_members(root))

    def _least_saving(self):
        """Returns the bytes that a split has to save without a later sum."""
        sizes = [value.nbytes for value in self.by_path.values()]
        return min(
            LONE_SHARE * sum(sizes),
            LONE_SHARE_OF_LARGEST * max(sizes, default=0),
        )

    def _take_cheapest_first(self):
        enough = self._least_saving()
        order = {path: k for k, path in enumerate(self.by_path)}
        classes_of = collections.defaultdict(set)
        for root, members in self.members.items():
            for path, *_ in members:
                classes_of[path].add(root)
        left = set(self.members) - self.classes_taken
        offers = {root: self._offer(root, order) for root in left}
        while offers:
            root = min(offers, key=lambda r: offers[r][0])
            (is_fused, *_), free, saved = offers.pop(root)
            if not any(map(self._is_kernel, free)):
                self.skipped[root] = "no matrix is split with it"
                continue
            why_not = self._why_not_in_blocks(root)
            blocks = {count for _, count in free.values()}
            if why_not and 1 not in blocks:
                # None of them would be split.
                count = min(blocks)
                self.skipped[root] = reasons.IN_BLOCKS.format(count, why_not)
                continue
            whole_class = self._bytes({path for path, *_ in self.members[root]})
            is_alone = (
                self._is_lone(root) and root not in self._gathered_classes
            )
            if is_alone and saved < enough:
                self.skipped[root] = self._why_not_alone(root, saved, enough)
                continue
            if saved < BROKEN_SHARE * whole_class:
                self.skipped[root] = reasons.goes_with(
                    self.members[root], free, self.by_path, self.taken
                )
                continue
            if is_fused:
                self._plan_in_blocks(root, free)
            else:
                self._take(root, free)
            changed = {r for path in free for r in classes_of[path]}
            for r in changed & set(offers):
                offers[r] = self._offer(r, order)

    def _offer(self, root, order):
        """Returns a sort key, the free members and the bytes they save."""
        free = self._free_members(root)
        saved = self._bytes(free)
        ratio = self.cost[root] / saved if saved else math.inf
        first = min((order[path] for path in free), default=math.inf)
        is_fused = any(
            blocks > 1 and self.is_column(self.by_path[path], dim)
            for path, (dim, blocks) in free.items()
        ) and bool(self._why_not_in_blocks(root))
        # Pairs first: a small layer at the end must not break one up.
        dims = sorted((order[path], dim) for path, (dim, _) in free.items())
        lone = self._is_lone(root)
        return (is_fused, lone, ratio, first, dims), free, saved

    def _is_lone(self, root):
        """Returns whether a class is not a column split and a row split.

        Kernels of one kind are none if the others are split along another dim.
        """
        if root not in self.is_paired:
            return True
        kernels = [m for m in self.members[root] if self._is_kernel(m[0])]
        left = [
            self._why_split(self.by_path[path], dim).startswith(reasons.ROW)
            for path, dim, _ in kernels
            if path not in self.taken
        ]
        return len(left) < len(kernels) and len(set(left)) < 2

    def _is_kernel(self, path):
        return self.by_path[path].ndim > 1

    def _why_not_alone(self, root, saved, enough):
        """Returns why a class is not split that no operation sums over."""
        return reasons.not_alone(saved, enough, self.count, self.sizes_of(root))

    def _plan_in_blocks(self, root, free):
        """Notes a class that is not split, because of its fused dims.

        The whole class is replicated. If its other variables were split, the
        activations between them and the fused ones would be redistributed.
        """
        fused = {path: v for path, v in free.items() if v[1] > 1}
        self.in_blocks.update(fused)
        self.classes_in_blocks[root] = min(
            fused, key=lambda path: (-self.by_path[path].ndim, path)
        )

    def _why_not_in_blocks(self, root):
        """Returns why the blocks of a class are not split; empty if they are.

        Each backend has a product whose result is kept as blocks, until a
        reshape or a split takes them.
        """
        if not self._splits_blocks:
            return reasons.NOT_HERE
        if not hasattr(self, "_cut_elsewhere"):
            self._cut_elsewhere = fused.find_cuts(self)
        return self._cut_elsewhere.get(root, "")

    def _choice(self, path):
        value = self.by_path[path]
        obstacles = [self.obstacle(value, i) for i in range(value.ndim)]
        dim, blocks = self.taken.get(path) or self.in_blocks.get(
            path, (None, 1)
        )
        why_not = blocks > 1 and self._why_not_in_blocks(
            self.class_of((value.index, dim))[0]
        )
        if why_not:
            why = reasons.IN_BLOCKS.format(blocks, why_not)
            why += reasons.INSTEAD * self.is_column(value, dim)
            dim, blocks = None, 1
        elif dim is not None:
            why = self._why_split(value, dim)
            why += reasons.EACH_BLOCK.format(blocks) * (blocks > 1)
            why += self._other_dim(value, dim)
            if value.shape[dim] % self.count:
                why += reasons.UNEVEN.format(value.shape[dim], self.count)
        elif path in self.forced:
            dim, why = self.forced[path], "override"
        elif self.count == 1:
            why = "one device along this axis"
        else:
            why = self._why_whole(path, value, obstacles)
        if path in self.disagreeing:
            why += reasons.DISAGREES
        return Choice(dim, blocks, why, obstacles)

    def _why_split(self, value, dim):
        if not hasattr(self, "_uses"):
            self._uses = uses.find(self)
        root, _ = self.class_of((value.index, dim))
        why = self._uses.get(
            (value.index, root), "split with the dims it is combined with"
        )
        layer = value.path.rpartition("/")[0]
        why += reasons.GATHERED * (layer in self._gathered_layers)
        why += reasons.IN_A_LOOP * (value.index in self.dims.in_loops)
        return why + reasons.SHARED_HEADS * (root in self.coarse)

    def _other_dim(self, value, dim):
        """Returns what a split along another dim would communicate.

        A stack of kernels may be split in two ways, such as that of experts:
        over the experts, or inside of each.
        """
        root, _ = self.class_of((value.index, dim))
        for i, size in enumerate(value.shape if value.ndim > 2 else ()):
            other, _ = self.class_of((value.index, i))
            if (
                size > 1
                and 0 in (dim, i)
                and other in self.is_paired.intersection(self.members)
                and self.cost[other] > self.cost[root]
            ):
                return reasons.other_dim(
                    i, self.sizes_of(other), self.sizes_of(root)
                )
        return ""

    def source(self, value):
        """Returns the index of a value's variable, through casts and slices."""
        return self._sources.get(value.index, value.index)

    def _why_whole(self, path, value, obstacles):
        if path in self.frozen:
            return self.frozen[path]
        if math.prod(value.shape) == 1:
            return reasons.one_element(value.shape)
        found = []
        for i, why in enumerate(obstacles):
            if value.shape[i] > 1:
                root, _ = self.class_of((value.index, i))
                if not why and root in self.classes_taken:
                    why = "split along another dim elsewhere"
                if not why and root in self.classes_in_blocks:
                    fused = self.classes_in_blocks[root]
                    why = f"goes with {fused!r}, which is whole"
                found.append(f"dim {i}: {why or self.skipped[root]}")
        return "; ".join(found)

    def _split_dim(self, value):
        """Returns the dim of a value that is split, or `None`."""
        for i, size in enumerate(value.shape):
            if size > 1:
                root, _ = self.class_of((value.index, i))
                if root in self.classes_taken:
                    return i
        return None

    def split_of(self, path):
        """Returns the dim of a variable that is split, or `None`."""
        if path in self.forced:
            return self.forced[path]
        dim, blocks = self.taken.get(path, (None, 1))
        root, _ = self.class_of((self.by_path[path].index, dim))
        if blocks > 1 and self._why_not_in_blocks(root):
            return None
        return dim
