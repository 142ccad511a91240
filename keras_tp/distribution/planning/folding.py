"""Folds repeated layers into one."""

import collections
import os
import re

# A number in a name, and the underscore that Keras sets before it: `dense` is
# the first of `dense_1` and `dense_2`.
_NUMBER = re.compile(r"_?\d+")
# The most layers that a repeated block may have.
_LONGEST = 200


class Fold(collections.namedtuple("Fold", "members")):
    """A run of equal blocks of layers, or one layer.

    Args:
        members: List of lists of layers; the lists have one length. The first
            stands for all.
    """

    @property
    def times(self):
        return len(self.members)

    @property
    def sample(self):
        """The layers of the first block."""
        return self.members[0]

    def title(self):
        """Returns the name of a repeated block, or of a group of layers.

        It is empty for one layer.
        """
        if self.times == 1:
            return self.prefix()
        names = [_common_name(member) for member in self.members]
        if all(names):
            return f"{self.times} x {span(names)}"
        ends = [span(self.paths(0)), span(self.paths(-1))]
        return f"{self.times} x {' ... '.join(dict.fromkeys(ends))}"

    def prefix(self):
        """Returns the path that all layers of the first block begin with.

        It is empty for one layer that is not repeated.
        """
        if self.times == 1 and len(self.sample) == 1:
            return ""
        return common_path([layer.path for layer in self.sample])

    def name(self, position):
        """Returns how many the layers at a position are, and their path."""
        times = f"{self.times} x " * (self.times > 1)
        return f"{times}{span(self.paths(position))}"

    def paths(self, position):
        """Returns the paths of the layers at a position of the blocks."""
        return [member[position].path for member in self.members]


def without_numbers(text):
    """Returns a text that is the same for layers that differ in a number."""
    return _NUMBER.sub("", text)


def fold(layers, key):
    """Folds runs of blocks of layers that are alike.

    The run that covers the most layers is folded; of several, the one with the
    shortest block. A block begins where the numbers of its layers do: after
    `down_3`, with `up_4` and not with `down_3` itself.

    Args:
        layers: List of objects with a `path`, in their order.
        key: Function of a layer that returns a hashable value. Layers with
            equal values are alike.

    Returns:
        List of `Fold`.
    """
    keys = [key(layer) for layer in layers]
    found, start = [], 0
    while start < len(layers):
        size, times = _longest_run(keys, start)
        if _begins_later(layers, keys, start, size):
            size = times = 1
        members = [
            layers[start + k * size : start + (k + 1) * size]
            for k in range(times)
        ]
        found.append(Fold(members))
        start += size * times
    return found


def grouped(folds):
    """Joins layers that are not repeated and are parts of one layer.

    Args:
        folds: List of `Fold`.

    Returns:
        List of `Fold`.
    """
    found = []
    for one in folds:
        first = _parent(one)
        if first and found and _parent(found[-1]) == first:
            found[-1] = Fold([found[-1].sample + one.sample])
        else:
            found.append(one)
    return found


def _parent(one):
    """Returns the outermost layer around layers that are not repeated."""
    first, _, rest = one.sample[0].path.partition("/")
    return first if rest and one.times == 1 else ""


def _begins_later(layers, keys, start, size):
    """Returns whether a run of blocks fits the numbers of layers better."""
    if _has_one_number(layers[start : start + size]):
        return False
    return any(
        _has_one_number(layers[at : at + size]) and _times(keys, at, size) > 1
        for at in range(start + 1, start + size)
    )


def _has_one_number(layers):
    found = [re.search(r"\d+", layer.path) for layer in layers]
    return len({number and number[0] for number in found}) == 1


def _longest_run(keys, start):
    """Returns the size of a block that repeats, and how often it does."""
    best, left = (1, 1), len(keys) - start
    for size in range(1, min(left // 2, _LONGEST) + 1):
        times = _times(keys, start, size)
        if times > 1 and size * times > best[0] * best[1]:
            best = size, times
    return best


def _times(keys, start, size):
    """Returns how often a block of this size is repeated from here on."""
    block, times = keys[start : start + size], 1
    while keys[start + times * size : start + (times + 1) * size] == block:
        times += 1
    return times


def common_path(paths):
    """Returns the leading parts that all paths have, as one path."""
    shared = []
    for parts in zip(*(path.split("/") for path in paths)):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return "/".join(shared)


def below(path, prefix):
    """Returns the part of a path after a prefix of it."""
    return path.removeprefix(prefix).lstrip("/") or path


def _common_name(layers):
    """Returns the start of the names of layers, such as `conv2_block1`."""
    paths = [layer.path for layer in layers]
    start = os.path.commonprefix(paths).rpartition("_")[0]
    return common_path(paths) or start


def span(paths):
    """Returns one text for paths that differ in their numbers.

    Such as `block_[0-11]/up` for 12 of them, or `dense ... dense_3`.
    """
    if len(set(paths)) == 1:
        return paths[0]
    numbers = [re.findall(r"\d+", path) for path in paths]
    bare = {re.sub(r"\d+", "#", path) for path in paths}
    if len(bare) > 1:
        return f"{paths[0]} ... {paths[-1]}"
    texts = [_span_of(list(dict.fromkeys(column))) for column in zip(*numbers)]
    return re.sub(r"\d+", lambda found: texts.pop(0), paths[0])


def _span_of(numbers):
    first, last = numbers[0], numbers[-1]
    if len(numbers) == 1:
        return first
    is_range = int(last) - int(first) == len(numbers) - 1
    if is_range or len(numbers) > 4:
        return f"[{first}-{last}]"
    return f"[{','.join(numbers)}]"


def groups(rows, key, row_of):
    """Returns the groups of a `tables.listing`, and a sentence about them.

    Args:
        rows: List of objects with a `path`.
        key: Function of a row; see `fold`.
        row_of: Function of a row and a name that returns a list of strings.

    Returns:
        List of `(heading, rows)`, and a list of strings, empty if no layer is
        repeated.
    """
    found, is_folded = [], False
    for one in fold(rows, key):
        title, prefix = one.title(), one.prefix()
        is_folded |= one.times > 1
        if one.times > 1 and len(one.sample) == 1:
            title, prefix = "", ""
        listed = [
            row_of(row, below(row.path, prefix) if prefix else one.name(index))
            for index, row in enumerate(one.sample)
        ]
        if not title and found and not found[-1][0]:
            found[-1][1].extend(listed)
        else:
            found.append((title, listed))
    sentence = (
        "`12 x` stands for 12 layers that are alike; sizes are those of one."
    )
    return found, [sentence] * is_folded
