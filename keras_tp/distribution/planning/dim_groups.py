"""Classes of dims that are split together, and dims that never are."""

import collections

from keras_tp.distribution.planning import cost
from keras_tp.distribution.planning.plan_rows import OF_ONE_PATH
from keras_tp.distribution.planning.rules import Dims
from keras_tp.distribution.planning.rules_math import IN_ATTENTION

# A dim that the devices do not divide is split if the parts are at least this
# large, so that the smaller part of the last device costs little.
LEAST_PART = 64
# Batch size for which the bytes of two splits are compared.
EXAMPLES = 4


def may_be_uneven(size, count):
    """Returns whether a dim is split that the devices do not divide."""
    return size >= max(LEAST_PART, count) * count


class Classes:
    """Groups the dims of a graph into classes that are split together.

    Args:
        graph: `Graph`.
        count: Int, number of devices along the axis that splits variables.
        uneven: Boolean. Whether a large dim may be split that `count` does not
            divide. Defaults to `True`.

    Attributes:
        dims: `Dims` of the graph.
        by_path: Dict of path to the `Value` of the variable, the first if
            several variables have this path.
        uneven: Set of the classes whose dims `count` does not divide, and
            which may be split nevertheless.
        members: Dict of class to a list of `(path, dim, blocks)`, the dims of
            variables that are split with it.
        frozen: Dict of path to the reason why no dim of the variable is split:
            it has heads that do not divide by the devices.
        cost: Dict of class to the bytes that splitting it communicates.
        sums: Dict of class to the list of `Value`s that are summed over the
            devices, or gathered as outputs, if it is split.
        is_paired: Set of the classes that an operation sums over.
    """

    def __init__(self, graph, count, uneven=True):
        self._may_be_uneven = uneven
        self.graph = graph
        self.count = count
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

    def _tie(self, a, b):
        """Gives two variables with the same path one layout."""
        if a is not b and a.shape == b.shape:
            for i in range(a.ndim):
                self.dims.same(a, i, b, i)
        elif a is not b:
            self.dims.keep_whole([a, b], OF_ONE_PATH)

    def _resolve_factors(self):
        """Splits a dim that is a product of two along the major factor.

        If the devices outnumber the major factor, the minor one is split too:
        2 KV heads by 4 query groups are split 2 by 2 on 4 devices. The inside
        of a head is never split in this way.
        """
        dims, count = self.dims, self.count
        kept = {dims.find(node) for node in dims.whole}
        inside = {
            dims.find(node)
            for node, why in dims.whole.items()
            if why == IN_ATTENTION
        }
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
                if (
                    count % size == 0
                    and dims.size(minor) % rest == 0
                    and dims.find(minor) not in inside
                ):
                    dims.join(flat, major)
                    self.composite[major] = size
                    continue
            dims.blocks.append((flat, minor, size, True))
            dims.whole.setdefault(major, f"{size} blocks of one dim")

    def _find_barred(self):
        """Returns a dict of each class that cannot be split to the reason."""
        dims = self.dims
        barred = {}
        for node, why in dims.whole.items():
            root = dims.find(node)
            # The reason must not depend on the order of the steps.
            barred[root] = min(why, barred.get(root, why))
        coarse = collections.defaultdict(set)
        for node, size in self.composite.items():
            coarse[dims.find(node)].add(size)
        self.coarse = coarse
        sizes = collections.defaultdict(set)
        for value in self.graph.values:
            for i, size in enumerate(value.shape):
                if size > 1:
                    sizes[dims.find((value.index, i))].add(size)
        aligned = self._find_aligned()
        self.uneven = set()
        for root, found in sizes.items():
            if root in barred:
                continue
            odd = sorted(size for size in found if size % self.count)
            is_large = odd and may_be_uneven(odd[0], self.count)
            if is_large and len(found) == 1 and root not in aligned:
                if self._may_be_uneven:
                    self.uneven.add(root)
                    continue
                barred[root] = self._does_not_divide(odd[0]) + (
                    "; this backend has no parts of different sizes"
                )
            for size in odd:
                if size not in coarse.get(root, ()):
                    barred.setdefault(root, self._does_not_divide(size))
        return barred

    def _find_aligned(self):
        """Returns the classes whose parts have to end where others do.

        Such as dims that are reshaped, repeated, or consist of blocks.
        """
        dims = self.dims
        nodes = [node for factors in dims.factors for node in factors]
        nodes += [
            node for fused, part, *_ in dims.blocks for node in (fused, part)
        ]
        nodes += [n for few, many in dims.repeats for n in (few, many.node)]
        nodes += dims.heads
        return {dims.find(node) for node in nodes}

    def _does_not_divide(self, size):
        sizes = [k for k in range(2, min(size, 64) + 1) if size % k == 0]
        return f"{size} does not divide by {self.count}, but by {sizes[:8]}"

    def _bar(self, node, why):
        self._barred.setdefault(self.dims.find(node), why)

    def _join(self, a, b):
        """Joins two classes that are not barred."""
        coarse = self.coarse.pop(self.dims.find(a), set())
        coarse |= self.coarse.pop(self.dims.find(b), set())
        self.dims.join(a, b)
        if coarse:
            self.coarse[self.dims.find(a)] = coarse

    def _resolve_repeats(self):
        """Splits KV heads with the query heads, or keeps them whole."""
        dims = self.dims
        for few, sum_of_few in dims.repeats:
            many = sum_of_few.node
            if (
                dims.find(few) in self._barred
                or dims.find(many) in self._barred
            ):
                dims.partials.append(sum_of_few)
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
                for few, sum_of_few in dims.repeats
                if dims.find(sum_of_few.node) in heads
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
        """Splits a dim of several blocks like its blocks, or keeps it whole."""
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

    def class_of(self, node):
        """Returns the class of a node and the number of its blocks."""
        root = self.dims.find(node)
        if root in self.blocked:
            part, count = self.blocked[root]
            return self.dims.find(part), count
        return root, 1

    def sizes_of(self, root):
        """Returns the bytes of what is summed if a class is split."""
        return [cost.size_of(value, self.graph) for value in self.sums[root]]

    def _find_members(self):
        """Lists the dims of variables that are in each class."""
        self.members = collections.defaultdict(list)
        self.frozen = {}
        for path, value in self.by_path.items():
            for i, size in enumerate(value.shape):
                if size == 1:
                    continue
                node = (value.index, i)
                root, blocks = self.class_of(node)
                why = self.obstacle(value, i)
                if not why:
                    self.members[root].append((path, i, blocks))
                elif (
                    value.ndim > 1 and self.dims.find(node) in self.head_classes
                ):
                    # A variable of heads that do not divide stays whole.
                    self.frozen.setdefault(path, f"heads: {why}")

    def _find_costs(self):
        """Sums the bytes that splitting a class would communicate."""
        self.cost = collections.Counter()
        self.sums = collections.defaultdict(list)
        self.is_paired = set()
        seen = set()
        for partial in self.dims.partials:
            root, _ = self.class_of(partial.node)
            if partial.backward:
                key = root, partial.tensor.index
                if key in seen:
                    continue
                seen.add(key)
            else:
                self.is_paired.add(root)
            self.sums[root].append(partial.tensor)
            self.cost[root] += self.bytes_sent(partial.tensor)
        for node, value in self.dims.states:
            # Gathered, and the gradient is reduce-scattered.
            root, _ = self.class_of(node)
            self.sums[root].append(value)
            self.cost[root] += self.bytes_sent(value)
        gathered = self.dims.gathers + [
            ((value.index, i), value)
            for value in self.graph.outputs
            for i, size in enumerate(value.shape)
            if size > 1
        ]
        for node, value in gathered:
            root, _ = self.class_of(node)
            self.sums[root].append(value)
            self.cost[root] += self.bytes_sent(value) // 2

    def bytes_sent(self, value):
        """Returns the bytes of a value for a batch of a few examples."""
        size = cost.size_of(value, self.graph)
        return size.at(EXAMPLES, self.graph.length)

    def obstacle(self, value, i):
        """Returns why a dim cannot be split; an empty string if it can be."""
        if value.shape[i] == 1:
            return "of size 1"
        node = (value.index, i)
        root, blocks = self.class_of(node)
        why = self._barred.get(self.dims.find(node)) or self._barred.get(root)
        is_odd = value.shape[i] % (self.count * blocks)
        if why is None and is_odd and root not in self.uneven:
            why = self._does_not_divide(value.shape[i])
        return why or ""
