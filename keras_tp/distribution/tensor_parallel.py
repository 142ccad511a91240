"""The distribution whose layouts come from a plan."""

import re
import warnings
import weakref

from keras_tp import backend
from keras_tp.distribution import arguments
from keras_tp.distribution import derived_variables
from keras_tp.distribution import distribution_lib
from keras_tp.distribution import optimizer_slots
from keras_tp.distribution import sharded_model
from keras_tp.distribution import variable_origin
from keras_tp.distribution.device_mesh import warn_if_unsplit
from keras_tp.distribution.distribution_lib import Distribution
from keras_tp.distribution.distribution_lib import ModelParallel
from keras_tp.distribution.layout_map import LARGE_VARIABLE_BYTES
from keras_tp.distribution.layout_map import LayoutMap
from keras_tp.distribution.layout_map import variable_bytes
from keras_tp.distribution.planning import fully_sharded
from keras_tp.distribution.planning import model_inputs
from keras_tp.distribution.planning import planner
from keras_tp.distribution.planning.model_inputs import NoPlanError
from keras_tp.distribution.sharding_plan import ShardingPlan
from keras_tp.distribution.sharding_plan import plan_sharding
from keras_tp.distribution.tensor_layout import axis_size
from keras_tp.distribution.tensor_layout import format_bytes
from keras_tp.distribution.tensor_layout import layout_with
from keras_tp.distribution.tensor_layout import split_largest_dim
from keras_tp.distribution.tensor_layout import splits_alike


class TensorParallel(ModelParallel):
    """Distribution that splits variables according to a plan.

    With `plan=`, variables are created in their final layout.

    Without it, each variable is at first split along its largest dim that
    divides evenly. The model is planned before its first compile, fit, call or
    save. Its variables then move to the plan's layouts one at a time and keep
    their values. A model that contains this model is planned again.

    Example:

    ```python
    set_distribution(TensorParallel())
    model = build_model()
    model.fit(x, y)
    # Or with a plan:
    plan = plan_sharding(build_model, DeviceMesh((1, 4), ["batch", "model"]))
    with TensorParallel(plan=plan).scope():
        model = build_model()
    ```

    Args:
        device_mesh: `DeviceMesh`. Defaults to the mesh of the plan, or to all
            devices on one axis, `"model"`.
        batch_dim_name: String, mesh axis that splits the first dim of the
            data. Defaults to the mesh axis `"batch"` or `"data"`, if there is
            one.
        plan: `ShardingPlan`. Defaults to `None`: each model is planned when it
            is first used.
        overrides: Dict, as `plan_sharding` takes it, for those plans. Defaults
            to `None`.
        strict: Boolean. Whether to raise a `ValueError` if a model cannot be
            planned, a variable is not in the plan, or the plan replicates a
            variable of two or more dims above 1 MiB that no override names.
            Defaults to `False`.
        auto_shard_dataset: Boolean. Whether each of several processes is
            given the whole data; see `Distribution`. Defaults to `True`.
        sequence_parallel: Boolean, as `plan_sharding` takes it, for those
            plans. Defaults to `False`.
        fully_shard: Boolean, as `plan_sharding` takes it, for those plans:
            variables are split over the axis of the batch too. Defaults to
            `False`.

    Attributes:
        shard_optimizer: Boolean. Whether optimizer slots are split over the
            batch axis too; see `ModelParallel`. Set it before the slots are
            made. Defaults to `False`.

    Raises:
        ValueError: if `device_mesh` is not the mesh of the plan, both a plan
            and an option of plans are given, or the batch axis is unknown.
    """

    def __init__(
        self,
        device_mesh=None,
        batch_dim_name=None,
        plan=None,
        overrides=None,
        strict=False,
        auto_shard_dataset=True,
        sequence_parallel=False,
        fully_shard=False,
    ):
        if plan is not None:
            _check_plan(
                *(plan, device_mesh),
                overrides=overrides,
                sequence_parallel=sequence_parallel,
                fully_shard=fully_shard,
            )
            device_mesh = plan.device_mesh
        elif device_mesh is None:
            device_mesh = distribution_lib.DeviceMesh(
                (distribution_lib.get_device_count(),), [planner.MODEL_AXIS]
            )
        arguments.check_mesh(device_mesh)
        if batch_dim_name is None:
            batch_dim_name = planner.batch_axis(device_mesh)
        layout_map = LayoutMap(device_mesh) if plan is None else plan.layout_map
        super().__init__(
            layout_map=layout_map,
            batch_dim_name=batch_dim_name,
            auto_shard_dataset=auto_shard_dataset,
        )
        # Keras replaces `None` with the first axis.
        self._batch_dim_name = batch_dim_name
        self.plan = plan
        self._is_given = plan is not None
        if fully_shard is True:
            fully_shard = self._batch_dim_name or True
        # What `plan_sharding` takes.
        self._options = {
            "overrides": dict(overrides or {}),
            "sequence_parallel": sequence_parallel,
            "fully_shard": planner.fully_shard_axis(fully_shard, device_mesh),
        }
        self._strict = strict
        self._planned = {}
        # Layer -> layout of its output, if it is gathered.
        self._gathered = weakref.WeakKeyDictionary()
        axis, batch = planner.model_axis(device_mesh), self._batch_dim_name
        shards_fully = self._options["fully_shard"] or any(
            fully_sharded.is_split(row, batch)
            for row in (() if plan is None else plan.variables)
        )
        size = axis_size(device_mesh, batch) if shards_fully else 1
        if size == axis_size(device_mesh, axis) == 1:
            warn_if_unsplit(device_mesh, [axis] if axis else [])

    num_model_replicas = Distribution.num_model_replicas

    def get_variable_layout(self, variable):
        shape = tuple(variable.shape)
        if getattr(variable, "_layout", None) is not None:
            return variable._layout
        if self._is_given:
            self._check_shape(variable)
            row = self._row(variable)
            if row is not None and row.is_of_several():
                return self._replicated(shape)
            layout = self._layout_of_quantized(variable)
            if layout is None:
                return super().get_variable_layout(variable)
            return self._possible(layout, variable)
        if not _is_weight(variable):
            return self._replicated(shape)
        layout = self._layout_of(variable)
        if layout is None:
            # A variable that is added before planning will be in the plan.
            layout = self.plan and derived_variables.layout_for(variable)
            if layout is not None:
                self._note(variable, layout)
                return layout
            variable._awaits_plan = True
            layout = self._largest_dim_split(shape)
        return layout

    def _largest_dim_split(self, shape):
        """Returns a layout that splits the largest dim that divides evenly."""
        mesh, axes = self.device_mesh, (None,) * len(shape)
        for axis in (planner.model_axis(mesh), self._options["fully_shard"]):
            axes = split_largest_dim(axes, shape, axis, mesh)
        return layout_with(axes, mesh, uneven=True)

    def get_tensor_layout(self, path):
        layout = super().get_tensor_layout(path)
        if layout is None and self._gathered:
            layout = self._gathered.get(variable_origin.current_layer())
        return layout

    def _check_shape(self, variable):
        """Raises `ValueError` if the plan is for a model of other sizes."""
        shape = tuple(variable.shape)
        row = self._row(variable)
        # Quantization packs a kernel into another shape.
        if (
            row is not None
            and _is_weight(variable)
            and row.shape != shape
            and not row.is_of_several()
            and "int8" not in (row.dtype, variable._dtype)
        ):
            raise ValueError(
                "The plan does not match the sizes of the model: variable "
                f"{variable.path!r} has shape {shape}, but {row.path!r} has "
                f"shape {row.shape} in the plan. Plan this model: "
                "`plan_sharding(build_fn, device_mesh)`. Received: "
                f"plan={self.plan!r}"
            )

    def _layout_of_quantized(self, variable):
        """Returns the layout from the plan of a quantized model, or `None`.

        The model may be quantized after it is built. Until then, a kernel that
        will be replaced is split along its largest dim that divides evenly.
        """
        row = self._row(variable)
        if row is None or row.dtype != "int8":
            return None
        if variable._dtype != "int8":
            return self._largest_dim_split(tuple(variable.shape))
        is_alike = row.shape == tuple(variable.shape)
        return self.plan.layout_of(row) if is_alike else None

    def _note(self, variable, layout):
        self._planned[id(variable)] = weakref.ref(variable), layout
        variable._awaits_plan = False

    def _layout_of(self, variable):
        """Returns the layout recorded for a variable, or `None`."""
        found, layout = self._planned.get(id(variable), (lambda: None, None))
        # Python may reuse the id of a variable that is gone.
        return layout if found() is variable else None

    def plan_model(self, model):
        """Plans a built model, unless a plan was given; moves nothing."""
        if self._is_given:
            return
        overrides = {
            pattern: axes
            for pattern, axes in self._options["overrides"].items()
            # An override may be meant for a model that is not built yet.
            if any(
                planner.override_matches(pattern, variable.path)
                for variable in model.weights
            )
        }
        options = {**self._options, "overrides": overrides}
        self.plan = plan_sharding(model, self.device_mesh, **options)
        for variable in model.weights:
            row, shape = self.plan[variable.path], tuple(variable.shape)
            # A path may have several variables, as a kernel and its packed
            # values while GPTQ quantizes it. One of another shape than the
            # plan's is replicated.
            is_alike = row.shape == shape
            layout = (
                self.plan.layout_of(row)
                if is_alike
                else self._replicated(shape)
            )
            self._note(variable, layout)
        rows = {row.path: row for row in self.plan.gathers}
        for layer in model._flatten_layers():
            self._gathered.pop(layer, None)
            if layer.path in rows:
                self._gathered[layer] = rows[layer.path].layout(
                    self.device_mesh, self._batch_dim_name
                )

    def can_check(self, model):
        return self._is_given or model_inputs.are_known(model)

    def check_model(self, model):
        """Plans a model that was not planned yet, and moves its variables."""
        is_planned = getattr(model, "_planned_under", None) is self and all(
            self._layout_of(variable) is not None for variable in model.weights
        )
        if not self._is_given and not is_planned:
            try:
                self.plan_model(model)
            except NoPlanError as e:
                self._keep_provisional(model, e)
                return
            _move_to_plan(model, self)
            model._planned_under = self
        self._report(model)

    def _keep_provisional(self, model, error):
        """Keeps the initial layouts of a model that cannot be planned."""
        message = (
            f"{error} Without a plan, each variable stays split along its "
            "largest dim that divides. Results are correct, but communication "
            "is not minimal. Pass a plan: "
            "`TensorParallel(plan=plan_sharding(build_fn, device_mesh, "
            "input_spec=...))`."
        )
        if self._strict:
            raise ValueError(message) from error
        warnings.warn(message, stacklevel=2)

    def why_replicated(self, variable):
        """Returns why the plan replicates a variable."""
        row = self._row(variable)
        if row is None:
            return "not in the plan"
        return self.plan.instead.get(row.path, row).why

    def _row(self, variable):
        """Returns the row of a variable, whose model may be renamed."""
        if self.plan is None:
            return None
        path, root = variable.path, variable_origin.origin_of(variable).root
        tail = path.split("/", 1)[-1]
        paths = (
            path,
            path.removeprefix(f"{root}/"),
            f"{self.plan.model_name}/{tail}",
            f"{root}/{tail}",
        )
        return next((self.plan[p] for p in paths if p in self.plan), None)

    def _report(self, model):
        unknown, large = [], []
        for variable in model.weights:
            if variable_origin.origin_of(variable).follows is not None:
                # LoRA or quantization added it, maybe after the plan.
                continue
            row, size = self._row(variable), variable_bytes(variable)
            if row is None:
                unknown.append(variable.path)
            elif (
                len(row.shape) > 1
                and size > LARGE_VARIABLE_BYTES
                and not row.is_split
                and not row.why.startswith("override")
            ):
                large.append(
                    f"{row.path!r} of shape {row.shape}, "
                    f"{format_bytes(size)} ({row.why})"
                )
        if unknown:
            message = (
                f"{len(unknown)} variable(s) of model {model.name!r} are not "
                f"in the plan, which was made for {self.plan.model_name!r}: "
                f"each device holds them whole. Received: {unknown[:5]}"
            )
            if self._strict:
                raise ValueError(message)
            warnings.warn(message, stacklevel=2)
        self._check_gathers(model)
        if large and self._strict:
            raise ValueError(
                f"{len(large)} large variable(s) of model {model.name!r} are "
                "not split. To replicate them without this warning, list them "
                "in `overrides` with a layout of Nones. Received: "
                f"{'; '.join(large)}"
            )

    def _check_gathers(self, model):
        """Warns if the plan gathers the output of a layer that is not there."""
        if not (self._is_given and self.plan.gathers):
            return
        dead = self._layout_map.report(model).dead
        missing = [
            row.path
            for row in self.plan.gathers
            if re.escape(f"{row.path}/output") in dead
        ]
        if not missing:
            return
        message = (
            f"The plan gathers the output of {len(missing)} layer(s) that are "
            f"not in model {model.name!r}. Results are correct, but more is "
            "communicated than the plan predicts. Keras gives layers without a "
            "name other numbers each time a model is built: give these layers "
            f"a name, and plan the model again. Received: {missing[:5]}"
        )
        if self._strict:
            raise ValueError(message)
        warnings.warn(message, stacklevel=2)


ShardingPlan._distribution_class = TensorParallel


def _check_plan(plan, device_mesh, **options):
    if not isinstance(plan, ShardingPlan):
        raise ValueError(
            "`plan` must be a `ShardingPlan`, from `plan_sharding`, or from "
            "`ShardingPlan.load` for a file. Received: "
            f"plan={plan!r} (of type {type(plan)})"
        )
    for name, value in options.items():
        if value:
            raise ValueError(
                f"Pass `{name}` to `plan_sharding`: an existing plan does not "
                f"change. Received: {name}={value}"
            )
    mesh = plan.device_mesh
    if device_mesh is not None and device_mesh is not mesh:
        raise ValueError(
            "A TensorParallel uses the mesh of its plan: leave `device_mesh` "
            f"out. Received: device_mesh={device_mesh} and a plan for {mesh}"
        )


def _is_weight(variable):
    role = variable_origin.origin_of(variable).role
    return role == variable_origin.WEIGHT


def _move_to_plan(model, distribution):
    """Moves each weight, and its slots, to its planned layout."""
    lib = backend.distribution_lib
    planned = sharded_model.planned_layouts(model, distribution)
    for variable, made, layout in planned:
        before = variable._layout
        # A variable that followed its kernel is in the plan now.
        variable._origin = made
        if before is None or not (
            splits_alike(before, layout)
            # Layouts of Keras have no such attribute.
            and getattr(before, "sequence_parallel", False)
            == getattr(layout, "sequence_parallel", False)
        ):
            lib.relayout_variable(variable, layout)
            optimizer_slots.note_slot_layout(variable)
