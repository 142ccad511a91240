"""Chooses, for each variable of a graph, the dim that is split.

Dims that have to be split together form a class. A class is barred if one of
its dims is kept whole or does not divide. Of the others, those that cost the
fewest bytes of communication for each byte of parameters that they save are
taken first, so that the pairs of a column and a row split (Megatron-LM,
Shoeybi et al. 2019, section 3) come out without anything being named.
"""

import collections
import math

from keras_tp.distribution.planning.graph import natural
from keras_tp.distribution.planning.rules import Dims

# A split whose outputs no other weight takes in has to save this share of all
# parameters: it costs a gather or an unbalanced end of the model.
LONE_SHARE = 0.01
# A class is left alone once most of its parameters are split otherwise.
BROKEN_SHARE = 0.5


class Choice(
    collections.namedtuple("Choice", ["dim", "blocks", "why", "obstacles"])
):
    """What becomes of one variable.

    Args:
        dim: Int, the dim that is split, or `None`.
        blocks: Int. In more than one block, each device holds a part of each:
            3 for a projection to queries, keys and values in one.
        why: String.
        obstacles: List with a string for each dim: why it cannot be split, or
            an empty one.
    """


class Reduction(
    collections.namedtuple(
        "Reduction", ["tensor", "backward", "path", "kind", "terms"]
    )
):
    """A sum over the devices that splitting causes.

    Args:
        tensor: `Value` that, or whose gradient, is summed.
        backward: Boolean. Whether it is the gradient.
        path: String, path of the layer that causes it.
        kind: String, name of the operation that causes it.
        terms: Int, how many gradients are added up before they are summed over
            the devices, such as those of queries, keys and values.
    """


class Solution:
    """The outcome for a graph and a number of devices.

    Attributes:
        choices: Dict of variable path to `Choice`.
        reductions: List of `Reduction`, in the natural order of their paths.
        split_dim: Function of a `Value`: the dim of it that is split, or
            `None`.
        unknown: Dict of each kind of step that has no rule to the path of the
            first.
    """

    def __init__(self, choices, reductions, split_dim, unknown):
        self.choices = choices
        self.reductions = reductions
        self.split_dim = split_dim
        self.unknown = unknown


def solve(graph, count, forced=None):
    """Chooses a split for every variable of a graph.

    Args:
        graph: `Graph`.
        count: Int, number of devices along the axis that splits variables.
        forced: Dict of path to a dim that is split, or to `None` for a
            variable that is not.

    Returns:
        A `Solution`.
    """
    return _Planner(graph, count, dict(forced or {})).solution()


class _Planner:
    def __init__(self, graph, count, forced):
        self.graph = graph
        self.count = count
        self.forced = forced
        self.dims = Dims(graph)
        self.composite = {}
        self.blocked = {}
        self.by_path = {}
        for value in graph.variables:
            first = self.by_path.setdefault(value.path, value)
            self._tie(first, value)
        self._resolve_factors()
        self._barred = self._find_barred()
        self._resolve_repeats()
        self._resolve_blocks()
        self._find_members()
        self._find_costs()
        self._sources = {}
        for step in graph.steps:
            if len(step.inputs) == 1 and self.dims.is_weight(step.inputs[0]):
                for value in step.outputs:
                    self._sources[value.index] = self._source(step.inputs[0])

    def solution(self):
        self.taken = {}
        self.classes_taken = set()
        if self.count > 1:
            self._take_forced()
            self._take_cheapest_first()
        choices = {path: self._choice(path) for path in self.by_path}
        return Solution(
            choices, self._reductions(), self._split_dim, self.dims.unknown
        )

    # -- the classes ---------------------------------------------------------

    def _tie(self, a, b):
        """Two variables of one path get one layout."""
        if a is not b and a.shape == b.shape:
            for i in range(a.ndim):
                self.dims.same(a, i, b, i)
        elif a is not b:
            why = "several variables of different shapes have this path"
            self.dims.keep_whole([a, b], why)

    def _resolve_factors(self):
        """A dim made of two is split along its major factor.

        If the devices are more, along that and part of the minor one: 2 heads
        of keys by 4 groups of queries on 4 devices are split 2 by 2.
        """
        dims, count = self.dims, self.count
        kept = {dims.find(node) for node in dims.whole}
        for flat, major, minor in dims.factors:
            size = dims.size(major)
            if dims.find(major) not in kept:
                if size % count == 0:
                    dims.join(flat, major)
                    dims.whole.setdefault(
                        minor, "minor part of a dim that is reshaped"
                    )
                    continue
                rest = count // size
                if count % size == 0 and dims.size(minor) % rest == 0:
                    dims.join(flat, major)
                    self.composite[major] = size
                    continue
            dims.blocks.append((flat, minor, size, True))
            dims.whole.setdefault(major, f"{size} blocks of one dim")

    def _find_barred(self):
        """Returns a dict of the class that cannot be split to the reason."""
        dims = self.dims
        barred = {}
        for node, why in dims.whole.items():
            root = dims.find(node)
            # The same reason whatever the order of the steps.
            barred[root] = min(why, barred.get(root, why))
        coarse = collections.defaultdict(set)
        for node, size in self.composite.items():
            coarse[dims.find(node)].add(size)
        self.coarse = coarse
        for value in self.graph.values:
            for i, size in enumerate(value.shape):
                if size > 1 and size % self.count:
                    root = dims.find((value.index, i))
                    if root not in barred and size not in coarse.get(root, ()):
                        barred[root] = self._does_not_divide(size)
        return barred

    def _does_not_divide(self, size):
        sizes = [k for k in range(2, min(size, 64) + 1) if size % k == 0]
        return f"{size} does not divide by {self.count}, but by {sizes[:8]}"

    def _bar(self, node, why):
        self._barred.setdefault(self.dims.find(node), why)

    def _join(self, a, b):
        """Joins two classes of which none is barred."""
        coarse = self.coarse.pop(self.dims.find(a), set())
        coarse |= self.coarse.pop(self.dims.find(b), set())
        self.dims.join(a, b)
        if coarse:
            self.coarse[self.dims.find(a)] = coarse

    def _resolve_repeats(self):
        """Heads of keys and values go with the queries', or stay whole."""
        dims = self.dims
        for few, many in dims.repeats:
            if (
                dims.find(few) in self._barred
                or dims.find(many) in self._barred
            ):
                size = dims.size(few)
                self._bar(
                    few,
                    f"{size} heads of keys and values do not divide by "
                    f"{self.count}: whole on each device",
                )
            else:
                self._join(few, many)
        heads = {dims.find(node) for node in dims.heads}
        for _ in range(2):
            heads |= {
                dims.find(few)
                for few, many in dims.repeats
                if dims.find(many) in heads
            }
            heads |= {
                dims.find(fused)
                for fused, part, *_ in dims.blocks
                if dims.find(part) in heads
            }
            heads |= {
                dims.find(flat)
                for flat, *parts in dims.factors
                if any(dims.find(part) in heads for part in parts)
            }
        self.head_classes = heads

    def _resolve_blocks(self):
        """A dim of several blocks is split as they are, or stays whole."""
        dims = self.dims
        changed = True
        while changed:
            changed = False
            self.blocked = {}
            fused_dims = collections.defaultdict(list)
            for fused, part, count, is_split in dims.blocks:
                fused_dims[dims.find(fused)].append((part, count, is_split))
            for fused, parts in sorted(fused_dims.items()):
                roots = sorted({dims.find(part) for part, *_ in parts})
                counts = {count for _, count, _ in parts}
                whole = fused in self._barred
                if (
                    whole
                    or len(counts) > 1
                    or fused in roots
                    or any(root in self._barred for root in roots)
                ):
                    if not whole:
                        self._bar(fused, self._why_fused(roots, counts))
                        changed = True
                    for part, _, is_split in parts:
                        root = dims.find(part)
                        if not is_split and root not in self._barred:
                            self._bar(part, "joined to a dim that is whole")
                            changed = True
                else:
                    for root in roots[1:]:
                        if dims.find(root) != dims.find(roots[0]):
                            self._join(roots[0], root)
                            changed = True
                    self.blocked[fused] = dims.find(roots[0]), counts.pop()

    def _why_fused(self, roots, counts):
        if len(counts) > 1:
            return f"cut in {' and in '.join(map(str, sorted(counts)))} parts"
        reasons = [self._barred[r] for r in roots if r in self._barred]
        return f"several blocks: {reasons[0]}" if reasons else "blocks overlap"

    def _class_of(self, node):
        """Returns the class of a node and in how many blocks it is split."""
        root = self.dims.find(node)
        if root in self.blocked:
            part, count = self.blocked[root]
            return self.dims.find(part), count
        return root, 1

    def _find_members(self):
        """Notes which dims of which variables are in a class."""
        self.members = collections.defaultdict(list)
        self.frozen = {}
        for path, value in self.by_path.items():
            for i, size in enumerate(value.shape):
                if size == 1:
                    continue
                node = (value.index, i)
                root, blocks = self._class_of(node)
                why = self._obstacle(value, i)
                if not why:
                    self.members[root].append((path, i, blocks))
                elif (
                    value.ndim > 1 and self.dims.find(node) in self.head_classes
                ):
                    # Nothing else of heads that do not divide is cut.
                    self.frozen.setdefault(path, f"heads: {why}")

    def _counts_heads(self, node):
        return self.dims.find(node) in self.head_classes

    def _find_costs(self):
        """Sums the bytes that splitting a class would communicate."""
        self.cost = collections.Counter()
        self.is_paired = set()
        seen = set()
        for partial in self.dims.partials:
            root, _ = self._class_of(partial.node)
            if partial.backward:
                key = root, partial.tensor.index
                if key in seen:
                    continue
                seen.add(key)
            else:
                self.is_paired.add(root)
            self.cost[root] += partial.tensor.nbytes
        for value in self.graph.outputs:
            for i, size in enumerate(value.shape):
                if size > 1:
                    root, _ = self._class_of((value.index, i))
                    self.cost[root] += value.nbytes // 2

    # -- the choice ----------------------------------------------------------

    def _free_members(self, root):
        """Returns the members of a class that are not split otherwise."""
        found = {}
        for path, i, blocks in self.members[root]:
            if (
                path not in self.taken
                and path not in self.frozen
                and path not in self.forced
            ):
                found.setdefault(path, (i, blocks))
        return found

    def _bytes(self, paths):
        return sum(self.by_path[path].nbytes for path in paths)

    def _take(self, root, free):
        self.classes_taken.add(root)
        self.taken.update(free)

    def _take_forced(self):
        for path, dim in self.forced.items():
            if dim is None:
                continue
            root, _ = self._class_of((self.by_path[path].index, dim))
            if root not in self._barred and root in self.members:
                self._take(root, self._free_members(root))

    def _take_cheapest_first(self):
        total = self._bytes(self.by_path) or 1
        order = {path: k for k, path in enumerate(self.by_path)}
        classes_of = collections.defaultdict(set)
        for root, members in self.members.items():
            for path, *_ in members:
                classes_of[path].add(root)
        left = set(self.members) - self.classes_taken
        offers = {root: self._offer(root, order) for root in left}
        while offers:
            root = min(offers, key=lambda r: offers[r][0])
            _, free, saved = offers.pop(root)
            if not any(self.by_path[path].ndim > 1 for path in free):
                continue
            whole_class = self._bytes({path for path, *_ in self.members[root]})
            lone = root not in self.is_paired and saved < LONE_SHARE * total
            if lone or saved < BROKEN_SHARE * whole_class:
                continue
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
        # Pairs first: a small layer at the end must not break one up.
        dims = sorted((order[path], dim) for path, (dim, _) in free.items())
        return (root not in self.is_paired, ratio, first, dims), free, saved

    # -- what comes out ------------------------------------------------------

    def _choice(self, path):
        value = self.by_path[path]
        obstacles = [self._obstacle(value, i) for i in range(value.ndim)]
        dim, blocks = None, 1
        if path in self.taken:
            dim, blocks = self.taken[path]
            why = self._why_split(value, dim)
        elif path in self.forced:
            dim, why = self.forced[path], "override"
        elif self.count == 1:
            why = "one device along this axis"
        else:
            why = self._why_whole(path, value, obstacles)
        return Choice(dim, blocks, why, obstacles)

    def _obstacle(self, value, i):
        """Returns why a dim cannot be split; an empty string if it can be."""
        if value.shape[i] == 1:
            return "of size 1"
        node = (value.index, i)
        root, blocks = self._class_of(node)
        why = self._barred.get(self.dims.find(node)) or self._barred.get(root)
        if why is None and value.shape[i] % (self.count * blocks):
            why = self._does_not_divide(value.shape[i])
        return why or ""

    def _why_split(self, value, dim):
        if not hasattr(self, "_uses"):
            self._uses = self._find_uses()
        root, _ = self._class_of((value.index, dim))
        return self._uses.get((value.index, root), "with the dims it meets")

    def _find_uses(self):
        """Returns a dict of (variable, class) to what a split of it does."""
        uses = {}
        for partial in self.dims.partials:
            if partial.backward:
                use = "column: the gradient of its input is summed"
            elif partial.step.kind == "Take":
                use = "rows of a table: what is looked up is summed"
            else:
                use = "row: the output is summed"
            root, _ = self._class_of(partial.node)
            for value in [*partial.step.inputs, *partial.step.variables]:
                for i in range(value.ndim):
                    if self._class_of((value.index, i))[0] == root:
                        uses.setdefault((self._source(value), root), use)
        return uses

    def _source(self, value):
        """Index of the variable that a value is a cast or a part of."""
        return self._sources.get(value.index, value.index)

    def _why_whole(self, path, value, obstacles):
        if path in self.frozen:
            return self.frozen[path]
        if math.prod(value.shape) == 1:
            return "a scalar"
        reasons = []
        for i, why in enumerate(obstacles):
            if value.shape[i] > 1:
                root, _ = self._class_of((value.index, i))
                if not why and root in self.classes_taken:
                    why = "split along another dim elsewhere"
                reasons.append(f"dim {i}: {why or 'costs more than it saves'}")
        return "; ".join(reasons)

    def _split_dim(self, value):
        """Returns the dim of a value that is split, or `None`."""
        for i, size in enumerate(value.shape):
            if size > 1:
                root, _ = self._class_of((value.index, i))
                if root in self.classes_taken:
                    return i
        return None

    def _reductions(self):
        """Sums over the devices; those of gradients where one is needed."""
        needs_gradient = self._needs_gradient()
        found = collections.defaultdict(list)
        for k, partial in enumerate(self.dims.partials):
            root, _ = self._class_of(partial.node)
            if root not in self.classes_taken:
                continue
            if not partial.backward:
                found[k].append(partial)
            elif partial.tensor.index in needs_gradient:
                # The gradients of one tensor are added up, then summed.
                found["gradient", root, partial.tensor.index].append(partial)
        return sorted(map(_reduction, found.values()), key=_reduction_key)

    def _needs_gradient(self):
        """Indices of the values that depend on a trainable variable."""
        found = {v.index for v in self.graph.variables if v.trainable}
        for step in self.graph.steps:
            around = [*step.inputs, *step.variables]
            if any(value.index in found for value in around):
                found.update(value.index for value in step.outputs)
        return found


def _reduction(partials):
    """Returns the `Reduction` of partial sums that are added up first."""
    first = min(partials, key=lambda p: natural(p.step.path))
    return Reduction(
        first.tensor,
        first.backward,
        first.step.path,
        first.step.kind,
        len(partials),
    )


def _reduction_key(r):
    return natural(r.path), r.backward, r.kind, r.tensor.shape, r.terms
