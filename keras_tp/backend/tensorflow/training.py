"""The steps of `fit`, `evaluate` and `predict` on the devices of a mesh."""

import functools
import warnings
import weakref

import numpy as np
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
from tensorflow.python.eager import core

from keras_tp.backend.fully_sharded import as_it_is
from keras_tp.backend.hooks import around
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


def _mesh_and_axis(current):
    return current.device_mesh.backend_mesh, current.batch_dim_name


def step_on_mesh(model, step):
    """Returns `run_on_mesh` of a model's step, such as `model.train_step`."""
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

    It returns DTensors, and does not wait for their values.
    """
    current = distribution()

    def run(data, **kwargs):
        data = batches.place(data, current)
        on_mesh = placement.on_mesh(*_mesh_and_axis(current))
        with on_mesh, errors.explained(step):
            return step(data, **kwargs)

    return run


@around
def hook_capture(original, self, tensor, /, *args, **kwargs):
    """Places the tensors on the mesh that a graph captures, as from `build`.

    TensorFlow makes tensors of a few elements constants of the graph. DTensor
    refuses larger ones that are not on the mesh.
    """
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


# Maps a graph and the id of a tensor to the tensor and its DTensor. Entries
# live as long as the graph.
_placed = weakref.WeakKeyDictionary()


def _is_value(tensor):
    return (
        isinstance(tensor, tf.Tensor)
        and hasattr(tensor, "numpy")
        and tensor.dtype.is_numpy_compatible
        and tensor.dtype != tf.string
        and not placement.is_dtensor(tensor)
        and len(tensor.shape) > 0
    )


@around
def hook_execute(original, context, operation, name, /, *args):
    """Places the inputs of an eager operation that are not on the mesh.

    Layers make such tensors in `__init__` or `adapt`, and use arrays and lists.
    """
    try:
        return original(context, operation, name, *args)
    except (core._NotOkStatusException, core._FallbackException) as e:
        # The second one means that there is a list among the inputs.
        message = getattr(e, "message", "got a regular tensor")
        is_missed = "got a regular tensor" in message
        if placement.current_mesh() is None or not is_missed:
            raise
        # Names of attributes, with their values, come after the inputs.
        is_name = [isinstance(x, str) for x in args] + [True]
        end = is_name.index(True)
        inputs = [_placed_input(x, args) for x in args[:end]]
        if all(a is b for a, b in zip(inputs, args)):
            raise
    return original(context, operation, name, *inputs, *args[end:])


def _placed_input(x, others):
    """Returns an input of an eager operation, on the mesh if it is a value.

    Arrays and lists of floats take the dtype of the tensor beside them.
    """
    if isinstance(x, (list, tuple)):
        leaves = tree.flatten(x)
        if any(map(tf.is_tensor, leaves)):
            placed = [_placed_input(value, others) for value in x]
            return x if all(a is b for a, b in zip(placed, x)) else placed
        numbers = all(isinstance(leaf, (int, float)) for leaf in leaves)
        if numbers and any(isinstance(leaf, float) for leaf in leaves):
            x = np.array(x)
    if isinstance(x, np.ndarray) and x.ndim and x.dtype.kind == "f":
        dtypes = [y.dtype for y in others if placement.is_dtensor(y)]
        dtypes = [dtype for dtype in dtypes if dtype.is_floating]
        with placement.off_mesh():
            x = tf.convert_to_tensor(x, next(iter(dtypes), None))
    if not _is_value(x):
        return x
    return boundary.enter_mesh(x, placement.current_mesh(), None)


@around
def hook_make_function(original, self, step_function):
    """Runs train and test steps on the mesh.

    The devices run a step while the next batch is drawn and placed. After each
    start, the step before is waited for: at most two steps run at a time, and
    the error of each step is raised.
    """
    if distribution() is None:
        return original(self, step_function)
    run = step_on_mesh(self, step_function)

    def function(iterator):
        outputs = None
        for _, data in zip(range(self.steps_per_execution), iterator):
            before, outputs = _running.pop(self, None), None
            try:
                outputs = run(data)
            finally:
                # If both steps fail, the first error is the cause.
                placement.wait(before, then=outputs)
            _running[self] = outputs
        if outputs is None:
            raise StopIteration
        if isinstance(iterator, tf.data.Iterator):
            return outputs
        # `train_on_batch` and `test_on_batch` give a single batch.
        return placement.to_host(_running.pop(self))

    return function


@around
def hook_make_predict_function(original, self, force=False):
    """Runs predict steps on the mesh."""
    if distribution() is None:
        return original(self, force)
    if self.predict_function is not None and not force:
        return self.predict_function
    run = step_on_mesh(self, self.predict_step)

    def predict_function(data):
        if not functions.is_built(self):
            x, _, _ = data_adapter_utils.unpack_x_y_sample_weight(data[0])
            functions.prepare(self, (x,), {"training": False})
        outputs = [placement.to_host(run(batch)) for batch in data]
        if len(outputs) == 1:
            return outputs[0]
        return tree.map_structure(
            lambda *parts: keras_trainer.concat(list(parts)), *outputs
        )

    self.predict_function = predict_function


@around
def hook_get_metrics_result(original, self):
    """Computes the metrics of an epoch on the mesh, outside of any step.

    Waits for the last step of the epoch.
    """
    current = distribution()
    if current is None or not placement.is_outermost():
        return original(self)
    placement.to_host(_running.pop(self, None))
    with placement.on_mesh(*_mesh_and_axis(current)):
        results = original(self)
    return placement.to_host(results)


@around
def hook_resolve_auto_jit_compile(original, self):
    """Resolves `jit_compile="auto"` to `False` under a distribution."""
    return False if distribution() is not None else original(self)


@around
def hook_maybe_symbolic_build(original, self, iterator=None, data_batch=None):
    """Builds everything before the first trace, as `tf.distribute` does."""
    if distribution() is None:
        return original(self, iterator, data_batch)
    if iterator is not None:
        # Do not draw a batch: a generator would not yield it again.
        data_batch = iterator._get_iterator().element_spec
        processes.same_model(self)

    def symbolic(x):
        if isinstance(
            x, (tf.experimental.Optional, tf.OptionalSpec, _NONE_SPEC)
        ):
            return None
        if x is None or hasattr(x, "dtype"):
            return x
        return tf.convert_to_tensor(x)

    self._symbolic_build(data_batch=tree.map_structure(symbolic, data_batch))


@around
def hook_layer_call(original, self, /, *args, **kwargs):
    """Runs the outermost eager call of a layer on the current mesh."""
    if isinstance(self, Model):
        functions.note_model(self, args, kwargs)
    current = distribution()
    if (
        current is None
        or not placement.is_outermost()
        or any_symbolic_tensors(args, kwargs)
        or not _belongs_on_mesh(self, args, kwargs)
    ):
        return original(self, *args, **kwargs)
    function = functools.partial(original, self)
    return boundary.call_on_mesh(
        *_mesh_and_axis(current), function, args, kwargs, _is_placed
    )


def _is_placed(x):
    is_variable = isinstance(x, tf.Variable) or hasattr(x, "_layout")
    return not is_variable and hasattr(x, "shape") and hasattr(x, "dtype")


def _belongs_on_mesh(layer, args, kwargs):
    leaves = tree.flatten((args, kwargs))
    has_dtensors = any(map(placement.is_dtensor, leaves))
    if isinstance(layer, DataLayer):
        # Data layers run in data pipelines and keep plain tensors.
        return has_dtensors
    if not layer.built and not isinstance(layer, Model):
        # Only a built layer shows whether it has variables. A layer without
        # variables stays off the mesh, which has no sparse tensors or strings.
        _build(layer, args, kwargs)
    # A layer that has no weights but draws random numbers computes with plain
    # tensors: the random state is read and assigned on and off the mesh.
    is_distributed = any(map(variables.is_distributed, layer.weights))
    return has_dtensors or is_distributed or not layer.built


def _build(layer, args, kwargs):
    """Builds a layer for its arguments, as its call does."""
    args, kwargs = tree.map_structure(boundary.symbolic, (args, kwargs))
    spec = CallSpec(
        layer._call_signature, layer._call_context_args, args, kwargs
    )
    with layer._open_name_scope():
        layer._maybe_build(spec)


@around
def hook_apply(original, self, grads, trainable_variables=None):
    """Makes embedding gradients dense, like the slots that they update."""
    if trainable_variables is not None:
        trainable_variables = list(trainable_variables)
        _build_optimizer(self, trainable_variables)
    if not variables.is_distributed(self._iterations):
        return original(self, grads, trainable_variables)
    mesh = self._iterations._value.layout.mesh
    if not placement.is_outermost():
        grads = [_dense(gradient) for gradient in grads]
        with as_it_is():
            return original(self, grads, trainable_variables)
    with placement.on_mesh(mesh), as_it_is():
        grads = [
            boundary.place_batch(_dense_on_host(gradient), mesh, None)
            for gradient in grads
        ]
        return original(self, grads, trainable_variables)


def _build_optimizer(optimizer, trainable_variables):
    """Builds an optimizer that was made outside of the distribution.

    A custom loop may do that. Its own state is moved to the mesh then.
    """
    if optimizer.built or variables.is_distributed(optimizer._iterations):
        return
    if not any(map(variables.is_distributed, trainable_variables)):
        return

    def build():
        with keras_backend.name_scope(optimizer.name, caller=optimizer):
            optimizer.build(trainable_variables)

    functions.run_before(build)


def _dense(gradient):
    is_sparse = isinstance(gradient, tf.IndexedSlices)
    return tf.convert_to_tensor(gradient) if is_sparse else gradient


def _dense_on_host(gradient):
    if placement.is_dtensor(getattr(gradient, "values", None)):
        return _dense(gradient)
    with placement.off_mesh():
        return _dense(gradient)


@around
def hook_make_generate_function(original, self):
    """Turns off `jit_compile`, which a function on the mesh cannot have."""
    if distribution() is not None and self.generate_function is None:
        without_jit_compile(self)
    return original(self)
