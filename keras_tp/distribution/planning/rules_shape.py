"""Rules for operations that move, cut or join tensors."""

import math
import re

from keras_tp.distribution.planning.graph import Value
from keras_tp.distribution.planning.graph import values_in
from keras_tp.distribution.planning.rules import rule
from keras_tp.distribution.planning.rules_math import axes_of

# Splitting a table with fewer rows, such as of segments, saves very little.
FEW_ROWS = 16


@rule("Transpose", "Moveaxis", "Swapaxes")
def transpose(dims, step):
    x, output, op = step.inputs[0], step.outputs[0], step.operation
    order = list(range(x.ndim))
    if step.kind == "Transpose":
        axes = op.axes if op.axes is not None else order[::-1]
        order = axes_of(list(axes), x.ndim)
    elif step.kind == "Swapaxes":
        i, j = op.axis1 % x.ndim, op.axis2 % x.ndim
        order[i], order[j] = j, i
    else:
        source = axes_of(op.source, x.ndim)
        order = [i for i in order if i not in source]
        for j, i in sorted(zip(axes_of(op.destination, x.ndim), source)):
            order.insert(j, i)
    for j, i in enumerate(order):
        dims.same(x, i, output, j)
    if x.index in dims.probabilities:
        dims.probabilities.add(output.index)


@rule("ExpandDims", "Squeeze")
def expand_or_squeeze(dims, step):
    x, output = step.inputs[0], step.outputs[0]
    for i, j in zip(_not_one(x), _not_one(output)):
        dims.same(x, i, output, j)


@rule("Reshape", "Flatten", "Ravel")
def reshape(dims, step):
    x, output = step.inputs[0], step.outputs[0]
    if math.prod(x.shape) != math.prod(output.shape):
        # An empty tensor: the trace records a dim of size 0 as 1.
        return
    if x.index in dims.probabilities:
        dims.probabilities.add(output.index)
    for before, after in _groups(x.shape, output.shape):
        if len(before) == len(after) == 1:
            dims.same(x, before[0], output, after[0])
        elif len(before) == 1:
            _factors(dims, x, before[0], output, after)
        elif len(after) == 1:
            _factors(dims, output, after[0], x, before)
        elif x.shape[before[0]] == output.shape[after[0]]:
            dims.same(x, before[0], output, after[0])
            for value, rest in ((x, before[1:]), (output, after[1:])):
                for i in rest:
                    dims.keep(value, i, "regrouped by a reshape")
        else:
            for value, group in ((x, before), (output, after)):
                for i in group:
                    dims.keep(value, i, "regrouped by a reshape")


def _factors(dims, flat, i, parts, factors):
    """Dim `i` of `flat` is the product of the dims `factors` of `parts`."""
    dims.reshaped(flat, i, parts, factors[0], factors[1])
    for j in factors[2:]:
        dims.keep(parts, j, "inside of a dim that is reshaped")


def _groups(before, after):
    """Yields pairs of groups of dims with equal products, without size 1."""
    i = j = 0
    while i < len(before) and j < len(after):
        first_i, first_j = i, j
        a, b = before[i], after[j]
        while a != b:
            if a < b:
                i += 1
                a *= before[i]
            else:
                j += 1
                b *= after[j]
        i, j = i + 1, j + 1
        group_a = [k for k in range(first_i, i) if before[k] > 1]
        group_b = [k for k in range(first_j, j) if after[k] > 1]
        if group_a and group_b:
            yield group_a, group_b


@rule("Split", "ArraySplit")
def split(dims, step):
    _split(dims, step, step.operation.axis)


def _split(dims, step, axis, count=None):
    x = step.inputs[0]
    k = axis % x.ndim
    sizes = {output.shape[k] for output in step.outputs}
    for output in step.outputs:
        for i in range(x.ndim):
            if i != k:
                dims.same(x, i, output, i)
        if len(sizes) == 1:
            parts = count or len(step.outputs)
            dims.block(x, k, output, k, parts, is_split=True)
        else:
            dims.keep(x, k, "split in unequal parts")
            dims.keep(output, k, "split in unequal parts")


@rule("Hsplit", "Vsplit", "Dsplit")
def split_along_a_named_dim(dims, step):
    x = step.inputs[0]
    axis = {"Vsplit": 0, "Hsplit": min(1, x.ndim - 1), "Dsplit": 2}[step.kind]
    _split(dims, step, axis)


@rule("Glu")
def gate(dims, step):
    """The first half of a dim is multiplied by the sigmoid of the second."""
    _split(dims, step, step.operation.axis, count=2)


@rule("Unstack")
def unstack(dims, step):
    x = step.inputs[0]
    k = step.operation.axis % x.ndim
    dims.keep(x, k, "taken apart")
    for output in step.outputs:
        for i in range(x.ndim):
            if i != k:
                dims.same(x, i, output, i - (i > k))


@rule("Append", "Concatenate", "Dstack", "Hstack", "Vstack")
def concatenate(dims, step):
    output = step.outputs[0]
    axis = {"Vstack": 0, "Hstack": min(1, output.ndim - 1), "Dstack": 2}.get(
        step.kind, getattr(step.operation, "axis", 0)
    )
    inputs = values_in(step.args)
    if axis is None or any(x.ndim != output.ndim for x in inputs):
        why = f"{step.kind} of tensors that are reshaped"
        return dims.keep_whole([*inputs, output], why)
    k = axis % output.ndim
    sizes = {x.shape[k] for x in inputs}
    for x in inputs:
        for i in range(x.ndim):
            if i != k:
                dims.same(x, i, output, i)
        if len(inputs) == 1:
            dims.same(x, k, output, k)
        elif len(sizes) == 1:
            dims.block(output, k, x, k, len(inputs), is_split=False)
        else:
            dims.keep(x, k, "concatenated with other sizes")
            dims.keep(output, k, "concatenated with other sizes")


@rule("Stack")
def stack(dims, step):
    output = step.outputs[0]
    k = step.operation.axis % output.ndim
    dims.keep(output, k, "stacked")
    for x in step.inputs:
        for i in range(x.ndim):
            dims.same(x, i, output, i + (i >= k))


@rule("GetItem")
def get_item(dims, step):
    x, output = step.inputs[0], step.outputs[0]
    key = step.args[1] if len(step.args) > 1 else step.kwargs["key"]
    key = list(key) if isinstance(key, (tuple, list)) else [key]
    if any(isinstance(k, Value) or isinstance(k, list) for k in key):
        return dims.keep_whole([x, output], "indexed by a tensor")
    given = sum(k is not None and k is not Ellipsis for k in key)
    if Ellipsis not in key:
        key.append(Ellipsis)
    i = j = 0
    for k in key:
        if k is None:
            j += 1
        elif k is Ellipsis:
            for _ in range(x.ndim - given):
                dims.same(x, i, output, j)
                i, j = i + 1, j + 1
        elif isinstance(k, slice):
            _slice(dims, x, i, output, j, k)
            i, j = i + 1, j + 1
        else:
            dims.keep(x, i, "indexed")
            i += 1


def _slice(dims, x, i, output, j, k):
    size, part = x.shape[i], output.shape[j]
    start = (k.start or 0) % size
    step = k.step or 1
    if size == part and step == 1:
        dims.same(x, i, output, j)
    elif step == 1 and part > 1 and size % part == 0 and start % part == 0:
        dims.block(x, i, output, j, size // part, is_split=True)
    else:
        dims.keep(x, i, "sliced")
        dims.keep(output, j, "sliced")


@rule("SliceUpdate")
def slice_update(dims, step):
    x, output, update = step.inputs[0], step.outputs[0], step.inputs[-1]
    for i in range(x.ndim):
        if update.ndim == x.ndim and update.shape[i] == x.shape[i]:
            dims.same(x, i, update, i)
        else:
            dims.keep(x, i, "updated along a part of this dim")
        dims.same(x, i, output, i)
    for other in step.inputs[1:]:
        if other.shape != x.shape:
            dims.keep_whole([other], "a part of another tensor")


@rule("Rearrange")
def rearrange(dims, step):
    """Relates the dims of a pattern such as `"b (h d) -> b h d"`."""
    x, output = step.inputs[0], step.outputs[0]
    pattern = step.args[1] if len(step.args) > 1 else step.kwargs["pattern"]
    sides = [re.findall(r"\([^)]*\)|\S+", s) for s in pattern.split("->")]
    if "..." in pattern:
        return dims.keep_whole([x, output], "Rearrange of dims without a name")
    for (value, names), (other, others) in (
        ((x, sides[0]), (output, sides[1])),
        ((output, sides[1]), (x, sides[0])),
    ):
        for i, name in enumerate(names):
            parts = name.strip("()").split()
            if name in others:
                dims.same(value, i, other, others.index(name))
            elif len(parts) == 2 and set(parts) <= set(others):
                major, minor = map(others.index, parts)
                dims.reshaped(value, i, other, major, minor)
            elif len(parts) > 1 or not any(
                name in group and set(group) <= set(names) and len(group) == 2
                for group in (o.strip("()").split() for o in others)
            ):
                dims.keep(value, i, "regrouped by a reshape")


@rule("Slice", "Pad", "Tile")
def cut_or_extended(dims, step):
    x, output = step.inputs[0], step.outputs[0]
    offset = output.ndim - x.ndim
    for i in range(x.ndim):
        if x.shape[i] == output.shape[i + offset]:
            dims.same(x, i, output, i + offset)
        else:
            dims.keep(x, i, f"{step.kind} along this dim")
            dims.keep(output, i + offset, f"{step.kind} along this dim")


@rule("Diag", "Diagonal", "Trace")
def diagonal(dims, step):
    x, output = step.inputs[0], step.outputs[0]
    op = step.operation
    if step.kind == "Diag":
        return dims.keep_whole([x, output], "Diag takes all of it")
    taken = axes_of([op.axis1, op.axis2], x.ndim)
    j = 0
    for i in range(x.ndim):
        if i in taken:
            dims.keep(x, i, f"{step.kind} over this dim")
        else:
            dims.same(x, i, output, j)
            j += 1
    for k in range(j, output.ndim):
        dims.keep(output, k, f"{step.kind} of two dims")


@rule("Repeat")
def repeat(dims, step):
    x, output, axis = step.inputs[0], step.outputs[0], step.operation.axis
    if axis is None:
        return dims.keep_whole([x, output], "repeated")
    for i in range(x.ndim):
        if i == axis % x.ndim:
            dims.repeated(x, i, output, i)
        else:
            dims.same(x, i, output, i)


@rule("Take")
def take(dims, step):
    table, output, axis = step.inputs[0], step.outputs[0], step.operation.axis
    if axis is None or len(step.inputs) < 2:
        return dims.keep_whole([table, output], "taken from")
    indices = step.inputs[1]
    axis %= table.ndim
    if dims.is_weight(table) and table.shape[axis] >= FEW_ROWS:
        dims.partial(table, axis, output)
    elif dims.is_weight(table):
        dims.keep(table, axis, "few rows: looked up, they would be summed")
    else:
        dims.keep(table, axis, "indexed")
    for i in range(table.ndim):
        if i != axis:
            dims.same(table, i, output, i + (indices.ndim - 1) * (i > axis))
    for i in range(indices.ndim):
        dims.same(indices, i, output, axis + i)


@rule("TakeAlongAxis")
def take_along_axis(dims, step):
    x, output = step.inputs[0], step.outputs[0]
    dims.elementwise(step.inputs, output)
    for i in axes_of(step.operation.axis, x.ndim):
        dims.keep(x, i, "indexed")
        dims.keep(output, i, "indexed")


def _not_one(value):
    return [i for i, size in enumerate(value.shape) if size > 1]
