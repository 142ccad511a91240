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

# Where a batch has no tensor: an input that is optional.
_NONE_SPEC = type(tf.type_spec_from_value(None))
# The outputs of a model's last step, as long as nothing has waited for it.
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
        step: Callable, such as `model.train_step`, that is given a batch.

    Returns:
        Callable that is given a batch as the data pipeline yields it. It does
        not wait for what it returns, which are DTensors.
    """
    without_jit_compile(model)

    @tf.autograph.experimental.do_not_convert
    def one_step(data):
        return step(data)

    if not model.run_eagerly:
        # Shapes stay known: the rules of operations need them, and a last
        # batch of another size is traced once.
        one_step = tf.function(one_step, reduce_retracing=False)
    return run_on_mesh(one_step)


def without_jit_compile(model):
    """Runs a model that was compiled for XLA without it, with a warning.

    As Keras does with a model that XLA cannot compile.
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
    """Returns a function of a batch that runs on the current mesh.

    Args:
        step: Callable that is given a batch on the devices of the mesh.
    """
    current = distribution()
    mesh, axis = _mesh_and_axis(current)

    def run(data, **kwargs):
        data = batches.place(data, current)
        with placement.on_mesh(mesh, axis), errors.explained(step):
            return step(data, **kwargs)

    return run


def hook_capture(original):
    """What a layer made when it was built, a tensor and no variable.

    Tensors of a few elements become constants of the graph; larger ones are
    put on the mesh, or DTensor refuses them.
    """

    @functools.wraps(original)
    def capture(self, tensor, *args, **kwargs):
        mesh = placement.current_mesh()
        if mesh is None:
            functions.check_captured(tensor)
        if mesh is None or not _is_value(tensor):
            return original(self, tensor, *args, **kwargs)
        # One of them, however often it is used.
        placed = _placed.setdefault(self, {})
        if id(tensor) not in placed:
            layout = dtensor.Layout.replicated(mesh, len(tensor.shape))
            with tf.init_scope():
                placed[id(tensor)] = tensor, placement.place(tensor, layout)
        return original(self, placed[id(tensor)][1], *args, **kwargs)

    return capture


# By graph and id, kept as long as the graph is: the tensor and what stands in
# its place.
_placed = weakref.WeakKeyDictionary()


def _is_value(tensor):
    if not isinstance(tensor, tf.Tensor) or not hasattr(tensor, "numpy"):
        return False
    if not (tensor.dtype.is_floating or tensor.dtype.is_integer):
        return False
    with tf.init_scope():
        return len(tensor.shape) > 0 and not dtensor.is_dtensor(tensor)


def hook_make_function(original):
    """The train and test functions.

    A step runs on the devices while the next batch is drawn and placed. What
    a step returns is waited for after the next one was started, so at most
    two are under way, and the error of a step is raised.
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
            # The batch of `train_on_batch` or `test_on_batch`: none follows.
            return to_host(_running.pop(self))

        return function

    return _make_function


def hook_make_predict_function(original):
    """The predict function."""

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

    While a step is traced, no variable can be made on the devices. `fit` and
    `evaluate` do the same in `_symbolic_build`.
    """
    if all(layer.built for layer in model._flatten_layers()):
        return
    x, _, _ = data_adapter_utils.unpack_x_y_sample_weight(batch)
    x = tree.map_structure(_symbolic, x)
    keras_backend.compute_output_spec(model, x, training=False)
    # The model is planned before a value is read.
    for variable in model.variables:
        _ = variable.value


def _symbolic(x):
    """Returns a `KerasTensor` in place of an array or tensor."""
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        return x
    # Keras does not know the lengths of numpy's strings.
    is_text = getattr(x.dtype, "kind", None) in ("O", "S", "U")
    dtype = "string" if is_text else keras_backend.standardize_dtype(x.dtype)
    return keras_backend.KerasTensor(x.shape, dtype)


def hook_get_metrics_result(original):
    """At the end of an epoch metrics are asked outside of any step.

    The last step of the epoch is waited for.
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
    """`jit_compile="auto"` does not ask for XLA under a distribution."""

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
            # Not a batch: one that is drawn from a generator is gone.
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
    """The outermost eager call runs on the mesh that is set."""

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
        # Plain and whole: what comes next knows of no mesh.
        return tree.map_structure(boundary.leave_mesh, outputs)

    return __call__


def _belongs_on_mesh(layer, args, kwargs):
    if isinstance(layer, DataLayer):
        # It is for data pipelines, and keeps plain tensors beside its state.
        return any(map(placement.is_dtensor, tree.flatten((args, kwargs))))
    if not layer.built and not isinstance(layer, Model):
        # A layer without variables stays off the mesh, where sparse tensors
        # and strings are.
        _build(layer, args, kwargs)
    # The state of random numbers is read and assigned on either side; what
    # draws them and has no weights computes with plain tensors, eagerly.
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
    """Gradients of embeddings are made dense: a slot is split as they are."""

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
    """Returns a gradient as a dense tensor; an eager one is on the mesh."""
    if isinstance(gradient, tf.IndexedSlices):
        on_host = is_eager and not placement.is_dtensor(gradient.values)
        with placement.off_mesh() if on_host else contextlib.nullcontext():
            gradient = tf.convert_to_tensor(gradient)
    if is_eager and gradient is not None:
        return boundary.place_batch(gradient, mesh, None)
    return gradient
