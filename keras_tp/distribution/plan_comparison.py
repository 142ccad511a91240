"""Compares a plan with another one, and with a layout map."""

from keras_tp.distribution.layout_map import LayoutMap
from keras_tp.distribution.tensor_layout import axis_names
from keras_tp.distribution.tensor_layout import axis_size
from keras_tp.distribution.tensor_layout import format_bytes


def difference(rows, others):
    """Compares rows of two plans, by path; see `ShardingPlan.diff`."""
    found = {}
    for path in {**rows, **others}:
        pair = rows.get(path), others.get(path)
        mine, theirs = (row and (row.axes, row.blocks) for row in pair)
        if mine != theirs:
            found[path] = mine, theirs
    return found


def compare(plan, layout_map):
    """Returns a list of `(path, message)`; see `ShardingPlan.compare`."""
    found = []
    for row in plan.variables:
        if isinstance(layout_map, LayoutMap):
            is_inside = row.path.startswith(f"{plan.model_name}/")
            root = plan.model_name if is_inside else None
            layout = layout_map.layout_for(row.path, root)
        else:
            layout = layout_map[row.path]
        theirs = () if layout is None else tuple(layout.axes)
        theirs = theirs or (None,) * len(row.shape)
        message = _comparison(plan, row, theirs)
        if message:
            found.append((row.path, message))
    return found


def _comparison(plan, row, theirs):
    if len(theirs) != len(row.shape):
        return f"has rank {len(row.shape)} and a layout of rank {len(theirs)}"
    count = axis_size(plan.device_mesh, plan.axis)
    for dim, axis in enumerate(theirs):
        mine, why = row.axes, row.obstacles[dim]
        if plan.axis not in axis_names(axis) or mine[dim] == axis:
            continue
        if row.shape[dim] % count and why:
            return f"dim {dim} is split and does not divide by {count}"
        if why:
            return f"dim {dim} is split, which communicates: {why}"
        return f"dim {dim} is split, the plan has {mine}: {row.why}"
    if row.is_split and not any(theirs):
        saved = row.nbytes - plan.device_bytes(row)
        return (
            f"replicated; {row.axes} would save "
            f"{format_bytes(saved)} on each device"
        )
    return ""
