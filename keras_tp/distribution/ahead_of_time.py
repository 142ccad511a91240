"""Compiles a train step for accelerators that are not there."""

import copy
import functools
import math
import time

import keras
from keras import tree
from keras.src.distribution import distribution_lib as keras_lib

from keras_tp import backend
from keras_tp.distribution import accelerators
from keras_tp.distribution import arguments
from keras_tp.distribution import compiled_step
from keras_tp.distribution.compile_report import CompileReport
from keras_tp.distribution.device_mesh import DeviceMesh
from keras_tp.distribution.distribution_lib import install
from keras_tp.distribution.layout_map import LayoutMap
from keras_tp.distribution.planning import discarded
from keras_tp.distribution.planning import model_inputs
from keras_tp.distribution.sharding_plan import plan_sharding
from keras_tp.distribution.tensor_layout import format_bytes
from keras_tp.distribution.tensor_layout import layout_like
from keras_tp.distribution.tensor_parallel import TensorParallel

# Of these numbers of layers, the law of a deep model is made. The first and
# the last layer differ from those between them.
COMPILED_DEPTHS = 2, 4
_DEFAULT_COUNT = 8


def compile_for(
    model_or_build_fn,
    distribution,
    target,
    count=None,
    *,
    batch_size,
    sequence_length=None,
    optimizer="adam",
    loss=None,
    input_spec=None,
    target_spec=None,
    depth=None,
    compiled_depths=COMPILED_DEPTHS,
):
    """Compiles the train step for an accelerator that is not there.

    XLA's own compiler for the accelerator makes the program that `fit` would
    run there. No device is needed, and no weights are allocated. Needs JAX and
    `pip install 'keras_tp[jax,ahead]'`.

    Example:

    ```python
    report = compile_for(
        build_model,
        None,
        "h100",
        8,
        batch_size=32,
        sequence_length=2048,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    print(report)
    report.fits, report.collectives["all_reduce"]["count"]
    ```

    A deep model takes long to compile. Two shallow ones give the figures of the
    deep one, as all figures are linear in the number of layers:

    ```python
    compile_for(lambda depth: build_model(num_layers=depth), None, "v5p", 64,
                batch_size=64, sequence_length=4096, loss=loss, depth=80)
    ```

    Args:
        model_or_build_fn: Keras model, which is made again from its config, or
            a function that builds one, of the number of layers if `depth` is
            given. Name counters, random state and global state are as before.
        distribution: `Distribution`. Its mesh gives the shape; its devices are
            replaced by those of the target. `None` plans the model for all
            devices on one axis, `"model"`.
        target: String, `"h100"`, `"v5e"`, `"v5p"` or `"v6e"`.
        count: Int, number of devices. Defaults to the size of the mesh of the
            distribution, or to 8.
        batch_size: Int, the global batch size.
        sequence_length: Int, size of the unknown input dims other than the
            batch; required if there are any. Defaults to `None`.
        optimizer: String or Keras optimizer, which is made again from its
            config. Not used with a model that is compiled by its function
            where `loss` is `None`. Defaults to `"adam"`.
        loss: String or Keras loss. Defaults to `None`: that of a model which is
            compiled.
        input_spec: Structure of shape tuples or `KerasTensor`s, the model's
            inputs. Defaults to `None`, for a model that knows its own.
        target_spec: Structure of `KerasTensor`s, the targets of a batch.
            Defaults to `None`: like the outputs, without their last dim for a
            sparse loss.
        depth: Int, the number of layers to report, for a function that takes
            one. What is planned here is split as in a model of that depth.
            Defaults to `None`.
        compiled_depths: Pair of ints, the numbers of layers to compile.
            Defaults to `(2, 4)`.

    Returns:
        A `CompileReport`: collectives, memory, FLOPs, the kernel of attention
        and a lower limit of the time of a step.

    Raises:
        ValueError: if the backend is not JAX, the target is unknown, `count` is
            not the size of the mesh, or no loss is known.
        ImportError: if a package with the compiler is not installed; the error
            says the command.
    """
    lib = _backend()
    accelerator = accelerators.accelerator(target)
    shape, names = _mesh_of(distribution, count)
    if depth is None:
        build_fn = _builder(model_or_build_fn)
    else:
        _check_depth(model_or_build_fn, depth, compiled_depths)
    kind = accelerator.device_type
    mesh = DeviceMesh(
        shape, names, [f"{kind}:{i}" for i in range(math.prod(shape))]
    )
    # It can be compiled for, and nothing can be placed on it.
    mesh._backend_mesh = lib.mesh(target, shape, names)
    mesh._is_here = True
    install()
    job = _Job(
        lib,
        accelerator,
        mesh,
        distribution,
        batch_size,
        sequence_length,
        optimizer,
        loss,
        input_spec,
        target_spec,
        depth and functools.partial(model_or_build_fn, depth),
    )
    began = time.perf_counter()
    if depth is None:
        name, figures, limit = job.run(build_fn)
        compiled = {None: figures}
    else:
        compiled = {}
        for layers in compiled_depths:
            name, figures, limit = job.run(
                functools.partial(model_or_build_fn, layers)
            )
            if not figures["flops"]:
                raise ValueError(
                    f"A step with only {layers} layers needs "
                    f"{format_bytes(figures['memory']['peak'])} of "
                    f"{format_bytes(limit)} on each device, so the compiler "
                    "makes no program to report. Use more devices or a smaller "
                    f"batch. Received: compiled_depths={compiled_depths}"
                )
            compiled[layers] = figures
    return CompileReport(
        model_name=name,
        accelerator=accelerator,
        mesh=dict(zip(names, shape)),
        batch_size=batch_size,
        sequence_length=sequence_length,
        compiled=compiled,
        depth=depth,
        compile_seconds=time.perf_counter() - began,
        memory_limit=limit,
    )


class _Job:
    """Builds and compiles models, all of them in the same way.

    Args:
        lib: The backend's module.
        accelerator: `Accelerator`.
        mesh: `DeviceMesh` of the target's devices.
        whole_fn: Function that builds the model to report, if that is another
            one than those to compile, or `None`.
        others: See `compile_for`.
    """

    def __init__(
        self,
        lib,
        accelerator,
        mesh,
        distribution,
        batch_size,
        sequence_length,
        optimizer,
        loss,
        input_spec,
        target_spec,
        whole_fn,
    ):
        self.lib = lib
        self.accelerator = accelerator
        self.mesh = mesh
        self.distribution = distribution
        self.batch_size = batch_size
        self.sequence_length = sequence_length
        self.optimizer = optimizer
        self.loss = loss
        self.input_spec = input_spec
        self.target_spec = target_spec
        self.whole_fn = whole_fn

    def run(self, build_fn):
        """Returns the name, the figures and the memory limit of a model."""
        current = _moved(
            self.distribution,
            self.mesh,
            build_fn,
            self.input_spec,
            self.whole_fn,
        )
        with (
            discarded.no_trace_left(),
            current.scope(),
            keras.StatelessScope(initialize_variables=False),
            discarded.initial_values_put_off(),
        ):
            model = build_fn()
            self.compile(model)
            x = self.inputs(model)
            y = self.targets(model, x)
            compiled = self.lib.compile_step(
                model, current.get_variable_layout, x, y, current
            )
        figures = compiled_step.figures(
            compiled["steps"], compiled["memory"], self.accelerator
        )
        return model.name, figures, compiled["memory_limit"]

    def compile(self, model):
        """Gives the model its optimizer and loss."""
        if self.loss is not None:
            optimizer = self.optimizer
            if isinstance(optimizer, keras.optimizers.Optimizer):
                optimizer = type(optimizer).from_config(optimizer.get_config())
            model.compile(optimizer=optimizer, loss=self.loss)
        elif not getattr(model, "compiled", False):
            raise ValueError(
                "A train step needs a loss: pass `loss`, or compile the model "
                f"in the function that builds it. Received: loss=None, {model}"
            )

    def inputs(self, model):
        """Returns a structure of `KerasTensor`s, one batch of inputs."""
        spec = model_inputs.call_spec_of(model, self.input_spec)
        model_inputs.narrow(spec, model)
        for one in tree.flatten(spec):
            shape = getattr(one, "shape", ())
            if None in shape[1:] and self.sequence_length is None:
                raise ValueError(
                    f"The inputs of {model.name!r} have unknown dims beside "
                    "the batch: pass `sequence_length`. Received: "
                    f"sequence_length=None, input shape {shape}"
                )
        args, kwargs = tree.map_structure(self.tensor, spec)
        if kwargs or len(args) != 1:
            raise ValueError(
                "`fit` passes one argument to a model, its inputs. Received: a "
                f"model with {len(args)} positional arguments and the keyword "
                f"arguments {list(kwargs)}"
            )
        return args[0]

    def tensor(self, spec):
        """Returns the `KerasTensor` of an input's shape and dtype."""
        if not hasattr(spec, "shape"):
            return spec
        sizes = [
            self.sequence_length if size is None else size
            for size in spec.shape
        ]
        if sizes and spec.shape[0] is None:
            sizes[0] = self.batch_size
        return keras.KerasTensor(sizes, spec.dtype, name=spec.name)

    def targets(self, model, x):
        """Returns a structure of `KerasTensor`s, the targets of a batch."""
        if self.target_spec is not None:
            return self.target_spec
        outputs = model(x)
        loss = self.loss
        if loss is None:
            loss = model._compile_loss._user_loss
        try:
            tree.assert_same_structure(loss, outputs)
        except (ValueError, TypeError):
            return tree.map_structure(lambda out: _target(loss, out), outputs)
        return tree.map_structure(_target, loss, outputs)


def _target(loss, output):
    loss = keras.losses.get(loss)
    name = getattr(loss, "__name__", type(loss).__name__).lower()
    if name.startswith("sparse"):
        return keras.KerasTensor(output.shape[:-1], "int32")
    return keras.KerasTensor(output.shape, output.dtype)


def _backend():
    name = keras.config.backend()
    if name != "jax":
        raise ValueError(
            "`compile_for` supports the Keras backend 'jax' only, because it "
            "uses XLA to compile for accelerators that this machine does not "
            "have. Set the environment variable KERAS_BACKEND=jax before Keras "
            f"is imported. Received: keras.config.backend()={name!r}"
        )
    return backend.load("ahead_of_time")


def _mesh_of(distribution, count):
    """Returns the shape and the axis names of the mesh to compile for."""
    if distribution is None:
        return (count or _DEFAULT_COUNT,), ["model"]
    if not isinstance(distribution, keras_lib.Distribution):
        arguments.check_distribution(distribution)
    mesh = distribution.device_mesh
    size = math.prod(mesh.shape)
    if count not in (None, size):
        raise ValueError(
            f"The mesh of the distribution has {size} devices. Leave `count` "
            "out, or pass a distribution with a mesh of that size; its devices "
            f"need not exist. Received: count={count}, device_mesh={mesh}"
        )
    return tuple(mesh.shape), list(mesh.axis_names)


def _builder(model_or_build_fn):
    """Returns a function without arguments that builds the model."""
    if not isinstance(model_or_build_fn, keras.Layer):
        if callable(model_or_build_fn):
            return model_or_build_fn
        raise ValueError(
            "`compile_for` takes a Keras model or a function that builds one. "
            f"Received: {model_or_build_fn}"
        )
    model = model_or_build_fn
    config = keras.saving.serialize_keras_object(model)
    config["build_config"] = config["compile_config"] = None
    compiled = model.get_compile_config() if model.compiled else None

    def build():
        built = keras.saving.deserialize_keras_object(config)
        if compiled:
            built.compile_from_config(compiled)
        return built

    return build


def _check_depth(build_fn, depth, compiled_depths):
    if isinstance(build_fn, keras.Layer) or not callable(build_fn):
        raise ValueError(
            "With `depth`, pass a function of the number of layers that builds "
            f"the model. Received: {build_fn}, depth={depth}"
        )
    low, high = compiled_depths
    if not 0 < low < high:
        raise ValueError(
            "`compiled_depths` must be two increasing numbers of layers. "
            f"Received: compiled_depths={compiled_depths}"
        )


def _moved(distribution, mesh, build_fn, input_spec, whole_fn):
    """Returns a distribution like the given one on another mesh."""
    planned = build_fn, mesh, input_spec, whole_fn
    if distribution is None:
        return _plan(*planned).distribution()
    if isinstance(distribution, TensorParallel):
        if distribution._is_given:
            plan = copy.copy(distribution.plan)
            plan.device_mesh = mesh
        else:
            plan = _plan(*planned, **distribution._options)
        made = TensorParallel(
            plan=plan, batch_dim_name=distribution.batch_dim_name
        )
        made.shard_optimizer = distribution.shard_optimizer
        return made
    made = copy.copy(distribution)
    made._device_mesh = mesh
    given = getattr(distribution, "_layout_map", None)
    if given is not None:
        made._layout_map = LayoutMap(mesh)
        for pattern, layout in given.items():
            moved = layout_like(layout.axes, layout, device_mesh=mesh)
            # Layouts of Keras have no such attribute.
            moved.sequence_parallel = getattr(
                layout, "sequence_parallel", False
            )
            made._layout_map[pattern] = moved
    return made


def _plan(build_fn, mesh, input_spec, whole_fn, overrides=None, **options):
    """Plans a model, with the layouts that its variables have in another one.

    A kernel that is worth a split beside two layers may be too small for one
    beside eighty.
    """
    plan = plan_sharding(build_fn, mesh, input_spec, overrides, **options)
    if whole_fn is None:
        return plan
    whole = plan_sharding(whole_fn, mesh, input_spec, overrides, **options)
    changed = {
        row.path: whole[row.path].axes
        for row in plan.variables
        if row.path in whole and row.axes != whole[row.path].axes
    }
    if not changed:
        return plan
    overrides = {**(overrides or {}), **changed}
    return plan_sharding(build_fn, mesh, input_spec, overrides, **options)
