"""The decisions of the planner: layouts, reasons and costs."""

import functools
import math
import re

from keras import Layer

from keras_tp import backend
from keras_tp.backend.saving import atomic_files
from keras_tp.distribution import arguments
from keras_tp.distribution import plan_comparison
from keras_tp.distribution.device_mesh import mesh_of_first_devices
from keras_tp.distribution.layout_map import LayoutMap
from keras_tp.distribution.pages import pictures
from keras_tp.distribution.pages import plan_page
from keras_tp.distribution.planning import cost
from keras_tp.distribution.planning import plan_file
from keras_tp.distribution.planning import plan_text
from keras_tp.distribution.planning import planner
from keras_tp.distribution.planning import predictions
from keras_tp.distribution.planning import trace
from keras_tp.distribution.tensor_layout import axis_sizes
from keras_tp.distribution.tensor_layout import is_uneven
from keras_tp.distribution.tensor_layout import part_shape


class ShardingPlan:
    """The layout of every variable of a model, and the predicted cost.

    `plan_sharding` makes it, and `load` reads it from a file. A plan is
    logical: for a model and a mesh it is the same on every backend.

    Example:

    ```python
    plan = plan_sharding(build_model, DeviceMesh((4,), ["model"]))
    print(plan, plan.memory(batch_size=32), plan.collectives(batch_size=32))
    ```

    Args:
        model_name: String.
        device_mesh: `DeviceMesh`.
        axis: String, the mesh axis that splits variables, or `None`.
        variables: List of `PlannedVariable`, in the order of their first use
            in the forward pass; unused ones last.
        reductions: List of `PlannedReduction`, in the order of the forward
            pass operations that cause them.
        activations: List of `Size`, bytes on one device that the forward pass
            keeps for the backward pass.
        split_outputs: List of `Size`, bytes of each model output that is split.
        without_rule: Dict of kind of operation or layer to path, with the first
            one of each kind that has no planning rule.
        gathers: List of `PlannedGather`, the outputs of layers that are
            gathered. Defaults to none.

    Attributes:
        instead: Dict of path to the `PlannedVariable` that this backend uses,
            for variables that it cannot split as planned. Not saved.
    """

    # The advice in an error about a plan in the place of another argument.
    how_to_use = "Write `TensorParallel(plan=plan)`."
    # `TensorParallel`; set by its module, which imports this one.
    _distribution_class = None

    def __init__(
        self,
        model_name,
        device_mesh,
        axis,
        variables,
        reductions,
        activations,
        split_outputs,
        without_rule,
        gathers=(),
    ):
        self.model_name = model_name
        self.device_mesh = device_mesh
        self.axis = axis
        self.variables = variables
        self.reductions = reductions
        self.activations = activations
        self.split_outputs = split_outputs
        self.without_rule = without_rule
        self.gathers = list(gathers)
        self.instead = {}

    def __getitem__(self, path):
        """Returns the `PlannedVariable` of a path; `KeyError` if none."""
        return self._by_path[path]

    def __contains__(self, path):
        return path in self._by_path

    @functools.cached_property
    def _by_path(self):
        return {row.path: row for row in self.variables}

    @property
    def layout_map(self):
        """A `LayoutMap` with the layout of every variable, by its path.

        It also has the outputs of layers that are gathered.
        """
        layout_map = LayoutMap(self.device_mesh)
        for row in self.variables:
            layout_map[re.escape(row.path)] = layout = self.layout_of(row)
            # Others have to divide, in a model of other sizes too.
            layout.uneven = is_uneven(row.shape, layout)
        batch_axis = planner.batch_axis(self.device_mesh)
        # A layer that is called twice has two rows.
        for row in {row.path: row for row in self.gathers}.values():
            layout = row.layout(self.device_mesh, batch_axis)
            layout_map[re.escape(f"{row.path}/output")] = layout
        return layout_map

    def layout_of(self, row):
        """Returns the `TensorLayout` of a `PlannedVariable`."""
        row = self.instead.get(row.path, row)
        return row.layout(self.device_mesh, self.axis)

    @property
    def split_share(self):
        """Share of the bytes in variables of two or more dims that is split."""
        matrices = [row for row in self.variables if len(row.shape) > 1]
        total = sum(row.nbytes for row in matrices)
        split = sum(row.nbytes for row in matrices if row.is_split)
        return split / total if total else 1

    def distribution(self):
        """Returns a `TensorParallel` distribution with these layouts."""
        return self._distribution_class(plan=self)

    # -- predictions ---------------------------------------------------------

    def memory(
        self, batch_size, sequence_length=None, optimizer="adam", dtype=None
    ):
        """Predicts the bytes on one device in a training step.

        Parameters, gradients and slots are exact but for scalars. Activations
        estimate what else a program of XLA for GPUs holds at its peak.

        Args:
            batch_size: Int, the global batch size.
            sequence_length: Int, size of the unknown input dims other than the
                batch; required if there are any. Defaults to `None`.
            optimizer: String, name of a Keras optimizer, or `"sgd_momentum"`.
            dtype: String, dtype to store floating-point variables in instead
                of their own. Defaults to `None`.

        Returns:
            Dict of `"parameters"`, `"gradients"`, `"slots"`, `"activations"`
            and `"total"` to bytes. A fully sharded plan also has `"gathered"`:
            the largest kernel and its gradient, while its layer is computed.
        """
        return predictions.memory(
            self, batch_size, sequence_length, optimizer, dtype
        )

    def collectives(self, batch_size, sequence_length=None):
        """Predicts the collectives of a training step of the logical program.

        The all-reduces of a loss over split outputs, of clipping and of metrics
        are not counted. With several replicas of the model, each gradient is
        all-reduced over them; that of a fully sharded variable is
        reduce-scattered, and the variable is gathered before each use.

        Args:
            batch_size: Int, the global batch size.
            sequence_length: Int, size of the unknown input dims other than the
                batch; required if there are any. Defaults to `None`.

        Returns:
            Dict of `"all_reduce"`, and of `"all_gather"` and `"reduce_scatter"`
            if there are any, to a named pair `(count, bytes)`: bytes of the
            results on one device.
        """
        return predictions.collectives(self, batch_size, sequence_length)

    @property
    def needs_sequence_length(self):
        """Whether predictions need the size of other dims than the batch."""
        sizes = [row.size for row in (*self.reductions, *self.gathers)]
        return any(size.length for size in (*sizes, *self.activations))

    def device_bytes(self, row, dtype=None):
        """Returns the bytes of a `PlannedVariable` on one device.

        `dtype` replaces the dtype of a floating-point variable.
        """
        item = cost.item_bytes(row.dtype)
        if dtype is not None and "float" in row.dtype:
            item = cost.item_bytes(dtype)
        part = part_shape(row.shape, row.axes, self.device_mesh)
        return math.prod(part) * item

    # -- comparisons ---------------------------------------------------------

    def diff(self, other):
        """Returns the differences from another plan.

        Args:
            other: `ShardingPlan`.

        Returns:
            Dict of path to a pair: `(axes, blocks)` in this plan and in the
            other, or `None` if a plan lacks the path.
        """
        return plan_comparison.difference(self._by_path, other._by_path)

    def compare(self, layout_map):
        """Returns the variables for which a `LayoutMap` does worse.

        Args:
            layout_map: `LayoutMap`, such as one written by hand.

        Returns:
            List of `(path, message)`, in the order of the plan: the map
            replicates a variable that the plan splits, splits a dim that
            should not be split (and why), or has the wrong rank.
        """
        return plan_comparison.compare(self, layout_map)

    # -- text ----------------------------------------------------------------

    def summary(self):
        """Returns a table: path, shape, layout, size on one device, why."""
        return plan_text.table(self)

    def __repr__(self):
        return (
            f"<{self.__class__.__name__} model={self.model_name!r}, "
            f"mesh={axis_sizes(self.device_mesh)}, "
            f"{len(self.variables)} variables, "
            f"{self.split_share:.1%} of the matrices split>"
        )

    __str__ = summary

    # -- files ---------------------------------------------------------------

    def to_json(self):
        """Returns the plan as JSON: a line for each variable and collective."""
        return plan_file.text_of(self)

    def to_html(
        self,
        path,
        batch_size=None,
        sequence_length=None,
        optimizer="adam",
        target=None,
    ):
        """Writes the plan as one HTML page, which needs no network.

        The page says the biggest problem first. It shows the memory and the
        communication of a training step, which the reader can change, the
        model's dataflow, and all variables.

        Args:
            path: String or path-like, the file to write.
            batch_size: Int, the global batch size of the step that is shown
                first. Defaults to 8 for each replica of the model.
            sequence_length: Int, its sequence length. Defaults to 1024, if
                the plan needs one.
            optimizer: String, as for `memory`. Defaults to `"adam"`.
            target: String, an accelerator that `compile_for` knows, such as
                `"h100"`; its memory is shown beside. Defaults to `None`.
        """
        step = batch_size, sequence_length, optimizer, target
        _replace(path, plan_page.page(self, *step))

    def plot(self, path):
        """Draws the model's dataflow, with its splits and sums, to a file.

        Repeated layers are drawn once.

        Args:
            path: String or path-like, such as `"plan.svg"`. For a file that
                ends in `.png`, the package `cairosvg` must be installed.
        """
        pictures.write(path, plan_page.picture(self))

    def _repr_html_(self):
        return plan_page.piece(self)

    def save(self, path):
        """Writes the plan to a file, with a digest; `load` reads it.

        An existing file is replaced as a whole, or not at all.

        Args:
            path: String or path-like, such as `"plan.json"`.
        """
        _replace(path, plan_file.with_digest(self.to_json()))

    @classmethod
    def load(cls, path, device_mesh=None):
        """Reads a plan from a file with the text of `save` or `to_json`.

        Args:
            path: String or path-like, the file to read.
            device_mesh: As for `from_json`. Defaults to `None`.

        Raises:
            ValueError: if the file is not a plan; names the file and the field.
        """
        with open(path, "rb") as file:
            data = file.read()
        try:
            return cls.from_json(data.decode(), device_mesh)
        except ValueError as e:
            raise ValueError(f"In the file '{path}': {e}") from e

    @classmethod
    def from_json(cls, text, device_mesh=None):
        """Returns the plan that `to_json` wrote.

        Args:
            text: String.
            device_mesh: `DeviceMesh` with the shape and axes of the plan.
                Defaults to a mesh of the first devices. If too few are
                available, it has the names that the next ones would have.

        Raises:
            ValueError: if the text is not a plan, or has another format (the
                error names the field), or the mesh differs.
        """
        fields = plan_file.read(text)
        mesh = fields.pop("device_mesh")
        shape, names = tuple(mesh["shape"]), list(mesh["axis_names"])
        if device_mesh is None:
            device_mesh = mesh_of_first_devices(shape, names)
        if tuple(device_mesh.shape) != shape or names != list(
            device_mesh.axis_names
        ):
            raise ValueError(
                f"The plan is for a mesh of shape {shape} with axes {names}. "
                f"Received: device_mesh={device_mesh}"
            )
        return cls(device_mesh=device_mesh, **fields)


def plan_sharding(
    model_or_build_fn,
    device_mesh,
    input_spec=None,
    overrides=None,
    sequence_parallel=False,
    fully_shard=False,
    gather_outputs=2**24,
):
    """Plans how the variables of a model are split over a mesh.

    The plan follows from the model's dataflow, not from names. It is the same
    on every backend and in every run. Variables are split over the mesh axis
    `"model"` (or the last axis if none has that name, but never over `"batch"`
    or `"data"`).

    Example:

    ```python
    mesh = DeviceMesh((1, 4), ["batch", "model"])
    plan = plan_sharding(build_model, mesh)
    with plan.distribution().scope():
        model = build_model()
    ```

    Args:
        model_or_build_fn: Keras model, or a function that builds one. The
            function is called without allocating weights. Name counters,
            random state and global state are restored, so the next model that
            is built has the paths of the plan.
        device_mesh: `DeviceMesh`. Its devices need not exist.
        input_spec: Structure of shape tuples or `KerasTensor`s, the model's
            inputs. Defaults to `None`, for a model that knows its own.
        overrides: Dict of path, or pattern that matches whole paths, to a
            tuple of mesh axes and `None`s, one for each dim. Dims that must be
            split together with an overridden dim follow. Defaults to `None`.
        sequence_parallel: Boolean. Whether activations of shape `(batch,
            sequence, features)` between row- and column-parallel layers are
            split along the sequence (Korthikanti et al. 2022). Defaults to
            `False`.
        fully_shard: Boolean. Whether every variable, and so its optimizer
            slots, is also split over the axis of the batch, along its largest
            whole dim that divides, and gathered before it is used (FSDP, or
            ZeRO-3, with tensor parallelism: Rajbhandari et al. 2020). A string
            names another axis. Defaults to `False`.
        gather_outputs: Int, a number of bytes. If less than 90 % of the
            matrices would be split, kernels of at least this size are split
            although what follows needs the output of their layer whole: the
            output is gathered in each forward pass. `None` gathers none.
            Defaults to 16 MiB.

    Returns:
        A `ShardingPlan`.

    Raises:
        ValueError: if the model's inputs are not known, an override or
            `fully_shard` does not fit the model or the mesh, or
            `gather_outputs` is not a number of bytes.
    """
    arguments.check_mesh(device_mesh)
    arguments.check_gather_outputs(gather_outputs)
    if isinstance(model_or_build_fn, Layer):
        graph = trace.trace(model_or_build_fn, input_spec)
    elif callable(model_or_build_fn):
        graph = trace.trace_build(model_or_build_fn, input_spec)
    else:
        raise ValueError(
            "`plan_sharding` takes a Keras model or a function that builds "
            f"one. Received: {model_or_build_fn}"
        )
    planned, instead = planner.plan_graph(
        *(graph, device_mesh, overrides),
        planner.fully_shard_axis(fully_shard, device_mesh),
        sequence_parallel,
        uneven=backend.distribution_lib.splits_unevenly(),
        in_blocks=backend.distribution_lib.splits_in_blocks(),
        gather_outputs=gather_outputs,
    )
    plan = ShardingPlan(device_mesh=device_mesh, **planned)
    plan.instead = instead
    return plan


def _replace(path, text):
    with atomic_files.replaced(path) as new:
        with open(new, "w", encoding="utf-8") as file:
            file.write(text)
