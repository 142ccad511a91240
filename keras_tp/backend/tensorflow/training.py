"""The steps of `fit`, `evaluate` and `predict` on the devices of a mesh."""

import contextlib
import functools
import warnings
import weakref

import tensorflow as tf
from keras.src import backend as keras_backend
from keras.src import tree
from keras.src.backend.common.keras_tensor import any_symbolic_tensors
from keras.src.backend.tensorflow import trainer as keras_trainer
from keras.src.distribution.distribution_lib import distribution
from keras.src.layers.layer import CallSpec
from keras.src.layers.preprocessing.data_layer import DataLayer
from keras.src.models.model import Model
from keras.src.trainers.data_adapters import data_adapter_utils
from tensorflow.experimental import dtensor

from keras_tp.backend.tensorflow import batches
from keras_tp.backend.tensorflow import boundary
from keras_tp.backend.tensorflow import errors
from keras_tp.backend.tensorflow import functions
from keras_tp.backend.tensorflow import placement
from keras_tp.backend.tensorflow import processes
from keras_tp.backend.tensorflow import variables

# The type spec of an optional input that a batch leaves out.
_NONE_SPEC = type(tf.type_spec_from_value(None))
# The outputs of a model's last step, until something waits for that step.
_running = weakref.WeakKeyDictionary()


def to_host(outputs):
    """Returns DTensors as plain tensors; raises the error of their step."""
    return tree.map_structure(placement.to_host, outputs)


def _mesh_and_axis(current):
    return current.device_mesh.backend_mesh, current.batch_dim_name


def step_on_mesh(model, step):
    """Returns a step function that runs on the current distribution's mesh.

    Args:
        model: A Keras model.
        step: Callable that takes a batch, such as `model.train_step`.

    Returns:
        Callable that takes a batch as the data pipeline yields it. It returns
        DTensors, and does not wait for their values.
    """
    without_jit_compile(model)

    @tf.autograph.experimental.do_not_convert
    def one_step(data):
        return step(data)

    if not model.run_eagerly:
        # Shapes stay static, because the rules in `ops` need them. A last
        # batch of another size costs one more trace.
        one_step = tf.function(one_step, reduce_retracing=False)
    return run_on_mesh(one_step)


def without_jit_compile(model):
    """Turns off a model's `jit_compile`, with a warning.

    Keras does the same for a model that XLA cannot compile.
    """
    if model.jit_compile and not model.run_eagerly:
        warnings.warn(
            f"Model {model.name!r} does not support `jit_compile=True` under a "
            "distribution: DTensor expands a step into one program for each "
            "device and cannot hand it to XLA as a whole. Proceeding with "
            "`jit_compile=False`.",
            stacklevel=2,
        )
        model.jit_compile = False


def run_on_mesh(step):
    """Returns a function that places a batch and runs a step on the mesh.

    Args:
        step: Callable that takes a batch of DTensors.
    """
    current = distribution()
    mesh, axis = _mesh_and_axis(current)

    def run(data, **kwargs):
        data = batches.place(data, current)
        with placement.on_mesh(mesh, axis), errors.explained(step):
            return step(data, **kwargs)

    return run


def hook_capture(original):
    """Places the tensors on the mesh that a graph captures, as from `build`.

    TensorFlow makes tensors of a few elements constants of the graph. DTensor
    refuses larger ones that are not on the mesh.
    """

    @functools.wraps(original)
    def capture(self, tensor, *args, **kwargs):
        mesh = placement.current_mesh()
        if mesh is None:
            functions.check_captured(tensor)
        if mesh is None or not _is_value(tensor):
            return original(self, tensor, *args, **kwargs)
        # Place a tensor once, however often the graph uses it.
        placed = _placed.setdefault(self, {})
        if id(tensor) not in placed:
            layout = dtensor.Layout.replicated(mesh, len(tensor.shape))
            with tf.init_scope():
                placed[id(tensor)] = tensor, placement.place(tensor, layout)
        return original(self, placed[id(tensor)][1], *args, **kwargs)

    return capture


# Maps a graph and the id of a tensor to the tensor and its DTensor. Entries
# live as long as the graph.
_placed = weakref.WeakKeyDictionary()


def _is_value(tensor):
    if not isinstance(tensor, tf.Tensor) or not hasattr(tensor, "numpy"):
        return False
    if not (tensor.dtype.is_floating or tensor.dtype.is_integer):
        return False
    with tf.init_scope():
        return len(tensor.shape) > 0 and not dtensor.is_dtensor(tensor)


def hook_make_function(original):
    """Runs train and test steps on the mesh.

    The devices run a step while the next batch is drawn and placed. After each
    start, the step before is waited for: at most two steps run at a time, and
    the error of each step is raised.
    """

    @functools.wraps(original)
    def _make_function(self, step_function):
        if distribution() is None:
            return original(self, step_function)
        run = step_on_mesh(self, step_function)

        def function(iterator):
            outputs = None
            for _, data in zip(range(self.steps_per_execution), iterator):
                before = _running.pop(self, None)
                try:
                    outputs = run(data)
                finally:
                    # If both steps fail, the first error is the cause.
                    placement.wait(before)
                _running[self] = outputs
            if outputs is None:
                raise StopIteration
            if isinstance(iterator, tf.data.Iterator):
                return outputs
            # `train_on_batch` and `test_on_batch` give a single batch.
            return to_host(_running.pop(self))

        return function

    return _make_function


def hook_make_predict_function(original):
    """Runs predict steps on the mesh."""

    @functools.wraps(original)
    def make_predict_function(self, force=False):
        if distribution() is None:
            return original(self, force)
        if self.predict_function is not None and not force:
            return self.predict_function
        run = step_on_mesh(self, self.predict_step)

        def predict_function(data):
            _build_for(self, data[0])
            outputs = [to_host(run(batch)) for batch in data]
            if len(outputs) == 1:
                return outputs[0]
            return tree.map_structure(
                lambda *parts: keras_trainer.concat(list(parts)), *outputs
            )

        self.predict_function = predict_function

    return make_predict_function


def _build_for(model, batch):
    """Builds a model before its first step is traced.

    A trace cannot create variables on the devices. `fit` and `evaluate` build
    the model in `_symbolic_build`.
    """
    if all(layer.built for layer in model._flatten_layers()):
        return
    x, _, _ = data_adapter_utils.unpack_x_y_sample_weight(batch)
    x = tree.map_structure(_symbolic, x)
    keras_backend.compute_output_spec(model, x, training=False)
    # The first read of a value applies the sharding plan.
    for variable in model.variables:
        _ = variable.value


def _symbolic(x):
    """Returns a `KerasTensor` in place of an array or tensor."""
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        return x
    # Keras does not know numpy's string dtypes, which include a length.
    is_text = getattr(x.dtype, "kind", None) in ("O", "S", "U")
    dtype = "string" if is_text else keras_backend.standardize_dtype(x.dtype)
    return keras_backend.KerasTensor(x.shape, dtype)


def hook_get_metrics_result(original):
    """Computes the metrics of an epoch on the mesh, outside of any step.

    Waits for the last step of the epoch.
    """

    @functools.wraps(original)
    def get_metrics_result(self):
        current = distribution()
        if (
            current is None
            or placement.current_mesh() is not None
            or not tf.executing_eagerly()
        ):
            return original(self)
        to_host(_running.pop(self, None))
        mesh, axis = _mesh_and_axis(current)
        with placement.on_mesh(mesh, axis):
            results = original(self)
        return to_host(results)

    return get_metrics_result


def hook_resolve_auto_jit_compile(original):
    """Resolves `jit_compile="auto"` to `False` under a distribution."""

    @functools.wraps(original)
    def _resolve_auto_jit_compile(self):
        return False if distribution() is not None else original(self)

    return _resolve_auto_jit_compile


def hook_maybe_symbolic_build(original):
    """Builds everything before the first trace, as `tf.distribute` does."""

    @functools.wraps(original)
    def _maybe_symbolic_build(self, iterator=None, data_batch=None):
        if distribution() is None:
            return original(self, iterator, data_batch)
        if iterator is not None:
            # Do not draw a batch: a generator would not yield it again.
            data_batch = iterator._get_iterator().element_spec
            processes.same_model(self)

        def symbolic(x):
            if x is None or isinstance(
                x,
                (tf.experimental.Optional, tf.OptionalSpec, _NONE_SPEC),
            ):
                return None
            return x if hasattr(x, "dtype") else tf.convert_to_tensor(x)

        self._symbolic_build(
            data_batch=tree.map_structure(symbolic, data_batch)
        )

    return _maybe_symbolic_build


def hook_layer_call(original):
    """Runs the outermost eager call of a layer on the current mesh."""

    @functools.wraps(original)
    def __call__(self, *args, **kwargs):
        if isinstance(self, Model):
            functions.note_model(self, args, kwargs)
        current = distribution()
        if (
            current is None
            or placement.current_mesh() is not None
            or not tf.executing_eagerly()
            or any_symbolic_tensors(args, kwargs)
            or not _belongs_on_mesh(self, args, kwargs)
        ):
            return original(self, *args, **kwargs)

        mesh, axis = _mesh_and_axis(current)

        def placed(x):
            if isinstance(x, tf.Variable) or hasattr(x, "_layout"):
                return x
            if not hasattr(x, "shape") or not hasattr(x, "dtype"):
                return x
            return boundary.enter_mesh(x, mesh, axis)

        args, kwargs = tree.map_structure(placed, (args, kwargs))
        with placement.on_mesh(mesh, axis), errors.explained():
            outputs = original(self, *args, **kwargs)
        # Later code runs off the mesh and needs whole, plain tensors.
        return tree.map_structure(boundary.leave_mesh, outputs)

    return __call__


def _belongs_on_mesh(layer, args, kwargs):
    if isinstance(layer, DataLayer):
        # Data layers run in data pipelines and keep plain tensors.
        return any(map(placement.is_dtensor, tree.flatten((args, kwargs))))
    if not layer.built and not isinstance(layer, Model):
        # Only a built layer shows whether it has variables. A layer without
        # variables stays off the mesh, which has no sparse tensors or strings.
        _build(layer, args, kwargs)
    # A layer that has no weights but draws random numbers computes with plain
    # tensors: the random state is read and assigned on and off the mesh.
    if not layer.built or any(
        variables.is_distributed(v) for v in layer.weights
    ):
        return True
    return any(placement.is_dtensor(x) for x in tree.flatten((args, kwargs)))


def _build(layer, args, kwargs):
    """Builds a layer for its arguments, as its call does."""
    args, kwargs = tree.map_structure(_symbolic, (args, kwargs))
    spec = CallSpec(
        layer._call_signature, layer._call_context_args, args, kwargs
    )
    with layer._open_name_scope():
        layer._maybe_build(spec)


def hook_apply(original):
    """Makes embedding gradients dense, like the slots that they update."""

    @functools.wraps(original)
    def apply(self, grads, trainable_variables=None):
        if not variables.is_distributed(self._iterations):
            return original(self, grads, trainable_variables)
        mesh = self._iterations._value.layout.mesh
        inside = placement.current_mesh() is not None
        eager_outside = tf.executing_eagerly() and not inside
        with (
            placement.on_mesh(mesh)
            if eager_outside
            else contextlib.nullcontext()
        ):
            grads = [_dense_gradient(g, mesh, eager_outside) for g in grads]
            return original(self, grads, trainable_variables)

    return apply


def _dense_gradient(gradient, mesh, is_eager):
    """Returns a dense gradient; places it on the mesh if it is eager."""
    if isinstance(gradient, tf.IndexedSlices):
        on_host = is_eager and not placement.is_dtensor(gradient.values)
        with placement.off_mesh() if on_host else contextlib.nullcontext():
            gradient = tf.convert_to_tensor(gradient)
    if is_eager and gradient is not None:
        return boundary.place_batch(gradient, mesh, None)
    return gradient
