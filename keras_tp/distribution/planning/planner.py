"""Makes a plan from the graph of a model, a mesh and overrides."""

import collections
import re
import warnings

from keras_tp.distribution.planning import activations
from keras_tp.distribution.planning import cost
from keras_tp.distribution.planning import fully_sharded
from keras_tp.distribution.planning import rules_math  # noqa: F401
from keras_tp.distribution.planning import rules_nn  # noqa: F401
from keras_tp.distribution.planning import rules_shape  # noqa: F401
from keras_tp.distribution.planning import sequence
from keras_tp.distribution.planning import solver
from keras_tp.distribution.planning.plan_rows import OF_ONE_PATH
from keras_tp.distribution.planning.plan_rows import PlannedGather
from keras_tp.distribution.planning.plan_rows import PlannedReduction
from keras_tp.distribution.planning.plan_rows import PlannedVariable
from keras_tp.distribution.tensor_layout import TensorLayout
from keras_tp.distribution.tensor_layout import as_layout
from keras_tp.distribution.tensor_layout import axis_size
from keras_tp.distribution.tensor_layout import check_layout
from keras_tp.distribution.tensor_layout import split_largest_dim

# Names of mesh axes that split batches, not variables.
BATCH_AXES = ("batch", "data")
MODEL_AXIS = "model"
# Of the bytes of matrices, the share that fully sharding may leave out before
# a warning.
_NOTABLE_SHARE = 0.1


def plan_graph(
    graph,
    device_mesh,
    overrides=None,
    fully_shard=None,
    sequence_parallel=False,
    uneven=True,
    in_blocks=True,
    gather_outputs=None,
):
    """Returns what a `ShardingPlan` is made of, except its mesh.

    Args:
        graph: `Graph`.
        device_mesh: `DeviceMesh`.
        overrides: Dict, as `plan_sharding` takes it. Defaults to `None`.
        fully_shard: String, the mesh axis, or `None`, the default.
        sequence_parallel: Boolean, as `plan_sharding` takes it. Defaults to
            `False`.
        uneven: Boolean. Whether the backend can split a large dim that the
            devices do not divide. Defaults to `True`. The plan does not depend
            on it, only `instead` does.
        in_blocks: Boolean. Whether the backend can split each block of a dim,
            such as queries, keys and values. Defaults to `True`, as `uneven`.
        gather_outputs: Int, as `plan_sharding` takes it. Defaults to `None`.

    Returns:
        A dict of the arguments, and `ShardingPlan.instead`.
    """
    axis = model_axis(device_mesh)
    count = axis_size(device_mesh, axis)
    overridden = _resolve_overrides(graph, device_mesh, overrides or {})
    forced = {
        path: axes.index(axis) if axis in axes else None
        for path, axes in overridden.items()
    }

    def solve(**kwargs):
        solution = solver.solve(
            *(graph, count, forced),
            sequence_parallel=sequence_parallel,
            **kwargs,
        )
        rows = _rows(graph, solution, axis, overridden)
        if fully_shard is not None:
            rows = [
                row
                if row.path in overridden
                else _fully_sharded(row, fully_shard, device_mesh)
                for row in rows
            ]
            again = fully_sharded.gathered_again(graph)
            rows = [
                row._replace(
                    gathered_again=row.path in again
                    and fully_sharded.is_split(row, fully_shard)
                )
                for row in rows
            ]
        return solution, rows

    solution, variables = solve(gather_outputs=gather_outputs)
    instead = {}
    if not (uneven and in_blocks):
        inserted = solution.inserted
        _, rows = solve(uneven=uneven, in_blocks=in_blocks, inserted=inserted)
        instead = {
            row.path: row
            for row, planned in zip(rows, variables)
            if (row.axes, row.blocks) != (planned.axes, planned.blocks)
        }
    # Some of its steps gather.
    graph, streams = solution.graph, solution.streams
    if sequence_parallel and count > 1 and not streams.kernels:
        _warn_if_no_sequence(graph, count)
    if fully_shard is not None:
        planned = [row for row in variables if row.path not in overridden]
        _warn_if_not_fully_sharded(graph, planned, fully_shard, device_mesh)
    in_parts = streams.split - streams.whole

    def split_dim(value):
        if value.index in in_parts:
            return sequence.SEQUENCE
        return solution.split_dim(value)

    arguments = dict(
        model_name=graph.name,
        axis=axis,
        variables=variables,
        reductions=[
            PlannedReduction(
                path=r.path,
                operation=r.kind,
                backward=r.backward,
                terms=r.terms,
                size=cost.size_of(r.tensor, graph),
                scattered=r.tensor.index
                in (streams.whole if r.backward else streams.split),
            )
            for r in solution.reductions
        ],
        activations=activations.kept(
            graph,
            split_dim,
            count,
            [r.tensor for r in solution.reductions if not r.backward],
            {row.path for row in variables if row.gathered_again},
        ),
        split_outputs=[
            cost.size_of(value, graph)
            for value in graph.outputs
            if solution.split_dim(value) is not None
        ],
        without_rule=solution.unknown,
        gathers=[
            PlannedGather(
                path=g.path,
                axes=tuple(
                    axis if dim == g.dim else None
                    for dim in range(g.tensor.ndim)
                ),
                is_scattered=g.is_scattered,
                size=cost.size_of(g.tensor, graph),
            )
            for g in solution.gathers
        ],
    )
    return arguments, instead


def _rows(graph, solution, axis, overridden):
    """Returns the list of `PlannedVariable`s of a solution."""
    rows, seen = [], set()
    shapes = collections.defaultdict(set)
    for value in graph.variables:
        shapes[value.path].add(value.shape)
    for value in graph.in_order_of_use():
        if value.path in seen:
            continue
        seen.add(value.path)
        choice = solution.choices[value.path]
        axes = [None] * value.ndim
        obstacles = tuple(choice.obstacles)
        if len(shapes[value.path]) > 1:
            # Of all reasons, the one that says how to read the row.
            obstacles = (OF_ONE_PATH,) * value.ndim
        if choice.dim is not None:
            axes[choice.dim] = axis
        row = PlannedVariable(
            path=value.path,
            shape=value.shape,
            dtype=value.dtype,
            trainable=value.trainable,
            axes=overridden.get(value.path, tuple(axes)),
            blocks=choice.blocks,
            why=sequence.why(choice.why, value.path, solution.streams),
            obstacles=obstacles,
            sequence_parallel=value.path in solution.streams.kernels,
        )
        rows.append(row)
    return rows


def _warn_if_no_sequence(graph, count):
    warnings.warn(
        f"`sequence_parallel=True` changes nothing in {graph.name!r}: no "
        "row-parallel layer or lookup gives activations of shape (batch, "
        f"sequence, features) whose sequence divides by {count}. Received: "
        "sequence_parallel=True",
        stacklevel=4,
    )


def _warn_if_not_fully_sharded(graph, rows, axis, device_mesh):
    matrices = [row for row in rows if len(row.shape) > 1]
    whole = [row for row in matrices if not fully_sharded.is_split(row, axis)]
    count = axis_size(device_mesh, axis)
    left, total = (sum(r.nbytes for r in found) for found in (whole, matrices))
    if count == 1 or left <= _NOTABLE_SHARE * total:
        return
    largest = max(whole, key=lambda row: row.nbytes)
    warnings.warn(
        f"`fully_shard={axis!r}` leaves {left / total:.0%} of the bytes of "
        f"{graph.name!r} whole on each of the {count} devices along {axis!r}: "
        f"no dim of {len(whole)} variables divides by {count}, apart from dims "
        "that are split already. Use an axis whose size divides them. The "
        f"largest is {largest.path!r}. Received: shape={largest.shape}, "
        f"axes={largest.axes}",
        stacklevel=4,
    )


def fully_shard_axis(value, device_mesh):
    """Returns the mesh axis over which variables are fully sharded, or `None`.

    Args:
        value: Boolean or string, as `plan_sharding` takes it.
        device_mesh: `DeviceMesh`.

    Raises:
        ValueError: if there is no such axis.
    """
    if value is None or value is False:
        return None
    axis = batch_axis(device_mesh) if value is True else value
    if axis in device_mesh.axis_names and axis != model_axis(device_mesh):
        return axis
    raise ValueError(
        "`fully_shard` must be a mesh axis that splits batches, or `True` for "
        f"an axis named {' or '.join(map(repr, BATCH_AXES))}: each device "
        "along it then holds a part of every variable. Received: "
        f"fully_shard={value!r}, axes={list(device_mesh.axis_names)}; axis "
        f"{model_axis(device_mesh)!r} splits the model"
    )


def _fully_sharded(row, axis, device_mesh):
    """Splits the largest whole dim of a `PlannedVariable` over another axis."""
    axes = split_largest_dim(row.axes, row.shape, axis, device_mesh)
    if axes == row.axes:
        count = axis_size(device_mesh, axis)
        if len(row.shape) < 2 or count == 1:
            return row
        why = (
            f"{row.why}; no other dim divides by {count}, so not over {axis!r}"
        )
        return row._replace(why=why)
    why = f"{row.why}; split over {axis!r} and gathered before use"
    return row._replace(axes=axes, why=why)


def model_axis(device_mesh):
    """Returns the name of the axis that splits variables, or `None`."""
    names = [name for name in device_mesh.axis_names if name not in BATCH_AXES]
    return MODEL_AXIS if MODEL_AXIS in names else (names or [None])[-1]


def batch_axis(device_mesh):
    """Returns the name of the axis that splits batches, or `None`."""
    for name in BATCH_AXES:
        if name in device_mesh.axis_names:
            return name
    return None


def override_matches(pattern, path):
    """Returns whether an override equals a path or matches all of it."""
    return pattern == path or re.fullmatch(pattern, path) is not None


def _resolve_overrides(graph, device_mesh, overrides):
    """Returns a dict of path to axes; raises if an override has no match."""
    found = {}
    for pattern, axes in overrides.items():
        axes = as_layout(axes, f"overrides[{pattern!r}]").axes
        matched = [
            value
            for value in graph.variables
            if override_matches(pattern, value.path)
        ]
        if not matched:
            raise ValueError(
                "An override matches no variable of model "
                f"{graph.name!r} (the whole path has to match). Received: "
                f"{pattern!r}; the first paths are "
                f"{[value.path for value in graph.variables[:3]]}"
            )
        layout = TensorLayout(axes, device_mesh)
        for value in matched:
            if found.get(value.path, axes) != axes:
                raise ValueError(
                    f"Two overrides match {value.path!r}. Received: {axes} and "
                    f"{found[value.path]}"
                )
            check_layout(
                layout,
                value.shape,
                f"override {pattern!r} of variable {value.path!r}",
            )
            found[value.path] = layout.axes
    return found
