"""Finds the sums over the devices that the splits of a solution cause."""

import collections

# Operations that a sum of gradients passes as it is.
_VIEWS = ("ExpandDims", "Moveaxis", "Reshape", "Squeeze", "Swapaxes")
_VIEWS += ("Transpose",)


class Reduction(
    collections.namedtuple(
        "Reduction", ["tensor", "backward", "path", "kind", "terms"]
    )
):
    """A sum over the devices that splitting causes.

    Args:
        tensor: `Value` that is summed, or whose gradient is.
        backward: Boolean. Whether the gradient is summed.
        path: String, path of the layer that causes it.
        kind: String, name of the operation that causes it.
        terms: Int, number of gradients that are added up before the sum over
            the devices, such as 3 for queries, keys and values.
    """


def not_summed(planner):
    """Finds the products that sum over a split dim with a whole kernel.

    The kernel is split along another dim, or not at all. Such a product has no
    partial sums: its other factor is gathered.

    Args:
        planner: The planner of `solver`, after it has chosen.

    Returns:
        A pair of sets: the indices of their `Dims.partials`, and the paths of
        the kernels.
    """
    variables = {value.index: value for value in planner.graph.variables}
    indices, paths = set(), set()
    for k, partial in enumerate(planner.dims.partials):
        root, _ = planner.class_of(partial.node)
        if root not in planner.classes_taken:
            continue
        for value in [*partial.step.inputs, *partial.step.variables]:
            variable = variables.get(planner.source(value))
            if variable is None or not _has_class(planner, variable, root):
                continue
            node = variable.index, planner.split_of(variable.path)
            if node[1] is None or planner.class_of(node)[0] != root:
                indices.add(k)
                paths.add(variable.path)
    held, needed = _held_split(planner), _before_a_gradient(planner.graph)
    for partial in planner.dims.partials:
        root, _ = planner.class_of(partial.node)
        if partial.backward or root not in planner.classes_taken:
            continue
        around = [*partial.step.inputs, *partial.step.variables]
        for value in partial.step.inputs:
            # The factor is whole: the backward pass gathers its gradient.
            if value.index in needed - held.keys() and _has_class(
                planner, value, root
            ):
                paths.update(
                    variables[planner.source(v)].path
                    for v in around
                    if planner.source(v) in variables and v.index in held
                )
    return indices, paths


def _held_split(planner):
    """Returns a dict: index of a value that is made in parts -> their class.

    A dim may be in a class that is split, and its value still be made whole:
    the variables that it is computed from are split along other dims.
    """
    held = {}
    for variable in planner.graph.variables:
        dim = planner.split_of(variable.path)
        if dim is not None:
            held[variable.index] = planner.class_of((variable.index, dim))[0]
    for step in planner.graph.steps:
        around = [*step.inputs, *step.variables]
        found = {held[value.index] for value in around if value.index in held}
        for value in step.outputs:
            roots = [r for r in found if _has_class(planner, value, r)]
            if roots:
                held[value.index] = min(roots)
    return held


def _has_class(planner, value, root):
    return any(
        size > 1 and planner.class_of((value.index, i))[0] == root
        for i, size in enumerate(value.shape)
    )


def of(planner, unsummed, more=()):
    """Finds the sums over the devices, in the order of their causes.

    Gradients are summed if a variable needs them and an output depends on them.

    Args:
        planner: The planner of `solver`, after it has chosen.
        unsummed: Set of the indices of partials that are not summed.
        more: List of pairs of the position of a step and another `Reduction`.
            Defaults to none.

    Returns:
        A list of `Reduction`, and a set of the indices of gathered values whose
        gradient is summed and split at once, by a reduce-scatter.
    """
    needed = _before_a_gradient(planner.graph)
    used = _before_an_output(planner.graph)
    views = _views(planner.graph)
    found = collections.defaultdict(list)
    for k, partial in enumerate(planner.dims.partials):
        root, _ = planner.class_of(partial.node)
        if root not in planner.classes_taken or k in unsummed:
            continue
        outputs = partial.step.outputs
        if not partial.backward:
            found["sum", k].append(partial)
        elif partial.tensor.index in needed and any(
            value.index in used for value in outputs
        ):
            # The gradients of a tensor are added up before the all-reduce.
            source = planner.source(partial.tensor)
            found["gradient", views.get(source, source)].append(partial)
    gathered = {step.outputs[0].index for step in planner.gathering()}
    # Backends sum the gradients of repeated heads on all devices.
    scattered = {
        index
        for index in gathered
        if ("gradient", index) in found
        and all(p.step.kind != "Repeat" for p in found["gradient", index])
    }
    for index in scattered:
        del found["gradient", index]
    position = {id(step): k for k, step in enumerate(planner.graph.steps)}
    causes = list(more)
    for partials in found.values():
        first = min(partials, key=lambda p: position[id(p.step)])
        reduction = Reduction(
            first.tensor,
            first.backward,
            first.step.path,
            first.step.kind,
            len(partials),
        )
        causes.append((position[id(first.step)], reduction))
    ordered = [r for _, r in sorted(causes, key=lambda cause: cause[0])]
    return ordered, scattered


def _views(graph):
    """Returns a dict: index of a reshaped value -> index of the original.

    The gradient of a layer's output is summed before it is reshaped.
    """
    found = {}
    for step in graph.steps:
        if step.kind in _VIEWS and len(step.inputs) == 1:
            index = step.inputs[0].index
            for value in step.outputs:
                if value.index not in graph.returned:
                    found[value.index] = found.get(index, index)
    return found


def _before_a_gradient(graph):
    """Returns the indices of values that need a gradient."""
    found = {v.index for v in graph.variables if v.trainable}
    for step in graph.steps:
        around = [*step.inputs, *step.variables]
        if any(value.index in found for value in around):
            found.update(value.index for value in step.outputs)
    return found


def _before_an_output(graph):
    """Returns the indices of values that the model's outputs depend on."""
    found = {value.index for value in graph.outputs}
    for step in reversed(graph.steps):
        if any(value.index in found for value in step.outputs):
            found.update(v.index for v in (*step.inputs, *step.variables))
    return found
