"""Trains a model and records its outputs, here or in a child process."""

import collections
import contextlib
import functools
import multiprocessing
import os
import pickle

import keras
import numpy as np
from keras import tree

from keras_tp.backend.processes import engines
from keras_tp.backend.processes import supervisor
from keras_tp.distribution import optimizer_slots

# The environment variables of a run of several processes.
_PROCESS_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    supervisor.ADDRESSES,
    supervisor.COUNT,
    supervisor.INDEX,
    "DTENSOR_JOBS",
    "DTENSOR_NUM_CLIENTS",
    "DTENSOR_CLIENT_ID",
    *engines.VARIABLES,
)

# These call their inner layers in loops that a backend may compile.
_LOOPS = (keras.layers.RNN, keras.layers.TimeDistributed)


class Run(collections.namedtuple("Run", "weights outputs slots losses values")):
    """The results of a few training steps. All arrays are NumPy arrays.

    Args:
        weights: List of `Weight`, in the order of `model.weights`.
        outputs: List of `(layer path, arrays)` of the first forward pass, in
            training mode, in the order in which the layers finish.
        slots: List with a list for each weight: its optimizer slots after the
            first step.
        losses: List of floats, the loss of each step.
        values: Three lists of the weights' arrays: initially, after the first
            step and after the last step.
    """


class Weight(collections.namedtuple("Weight", ["path", "layer", "trainable"])):
    """A weight: its path, the path of its layer, and whether it is trained."""


def train(build_fn, x, y, steps, batch_size, seed):
    """Builds a model under the current distribution, and trains it.

    Returns a `Run`. The arguments are those of `verify`; the seed is set
    before the model is built and before it is trained.
    """
    keras.utils.set_random_seed(seed)
    model = build_fn()
    if not getattr(model, "compiled", False):
        raise ValueError(
            "`build_fn` must return a compiled Keras model, since `verify` "
            f"trains it. Received: build_fn={build_fn}, which returned {model}"
        )
    batches = [_batch((x, y), step, batch_size) for step in range(steps)]
    if not model.built:
        model(batches[0][0])
    keras.utils.set_random_seed(seed)
    values = [_arrays(model.weights)]
    with _outputs_kept(model) as outputs:
        model(batches[0][0], training=True)
    losses = []
    for batch_x, batch_y in batches:
        losses.append(_loss(model.train_on_batch(batch_x, batch_y)))
        if len(losses) == 1:
            values.append(_arrays(model.weights))
            kept_slots = _slots(model)
    values.append(_arrays(model.weights))
    return Run(_weights(model), outputs, kept_slots, losses, values)


def sent(result):
    """Restores a `Run` from the plain tuple that a message makes of it.

    An exit code, of a child that failed, is returned unchanged.
    """
    if not isinstance(result, tuple):
        return result
    run = Run(*result)
    return run._replace(weights=[Weight(*weight) for weight in run.weights])


class Child:
    """A child process without a distribution, which calls `train`."""

    def __init__(self, *arguments):
        # A fork would share the threads and devices of the frameworks.
        context = multiprocessing.get_context("spawn")
        self._receiver, sender = context.Pipe(duplex=False)
        settings = (
            keras.config.floatx(),
            keras.config.epsilon(),
            keras.config.image_data_format(),
            keras.dtype_policies.serialize(keras.config.dtype_policy()),
        )
        self._process = context.Process(
            target=_train_and_send, args=(sender, settings, arguments)
        )
        self._process.start()
        # After this, `recv` raises `EOFError` when the child ends.
        sender.close()

    def has_ended(self, seconds):
        """Waits up to `seconds`; returns whether the child is done."""
        return self._receiver.poll(seconds)

    def result(self):
        """Returns the child's `Run`, or its exit code if there is none."""
        try:
            result = self._receiver.recv()
        except EOFError:
            result = None
        self._process.join()
        self._receiver.close()
        return self._process.exitcode if result is None else result


def check_picklable(build_fn):
    """Raises `ValueError` unless a child process can call `build_fn`."""
    if isinstance(build_fn, keras.Layer) or not callable(build_fn):
        raise ValueError(
            "`build_fn` must be a function without arguments that returns a "
            "compiled model. To verify an existing model, save it and pass "
            "`functools.partial(keras.models.load_model, path)`. Received: "
            f"build_fn={build_fn!r} (of type {type(build_fn)})"
        )
    try:
        pickle.dumps(build_fn)
    except (pickle.PicklingError, AttributeError, TypeError) as e:
        raise ValueError(
            "`build_fn` must be defined at the top of a module, because a "
            "child process imports it. Pass its arguments with "
            "`functools.partial`. To verify an existing model, save it and "
            "pass `functools.partial(keras.models.load_model, path)`. "
            f"Received: build_fn={build_fn} ({e})"
        ) from e


def _train_and_send(sender, settings, arguments):
    for name in _PROCESS_VARIABLES:
        os.environ.pop(name, None)
    floatx, epsilon, data_format, policy = settings
    keras.config.set_floatx(floatx)
    keras.config.set_epsilon(epsilon)
    keras.config.set_image_data_format(data_format)
    keras.config.set_dtype_policy(keras.dtype_policies.deserialize(policy))
    sender.send(train(*arguments))
    sender.close()


def _batch(data, step, size):
    count = len(tree.flatten(data)[0])
    rows = np.arange(step * size, (step + 1) * size) % count
    return tree.map_structure(lambda array: np.asarray(array)[rows], data)


def _loss(logs):
    return float(logs[0] if isinstance(logs, (list, tuple)) else logs)


def _array(value):
    array = np.asarray(keras.ops.convert_to_numpy(value))
    # NumPy has no bfloat16 of its own. Else a copy: a backend may share this
    # memory, and write to it later.
    return np.array(array, None if array.dtype.kind in "biuf" else "float32")


def _arrays(variables):
    return [_array(variable) for variable in variables]


def _weights(model):
    layers = {}
    for layer in model._flatten_layers():
        for variable in layer.weights:
            # Inner layers come later: a weight belongs to the innermost one.
            layers[id(variable)] = layer.path or layer.name
    return [
        Weight(v.path, layers.get(id(v), model.name), v.trainable)
        for v in model.weights
    ]


def _slots(model):
    """Returns a list with the slots of each weight, in a fixed order."""
    kept = collections.defaultdict(list)
    for slot, variable, _ in optimizer_slots.slots_of(model.optimizer):
        kept[id(variable)].append(_array(slot))
    return [kept[id(variable)] for variable in model.weights]


@contextlib.contextmanager
def _outputs_kept(model):
    """Yields a list that collects the outputs of each layer call.

    Each layer object gets its own `call` meanwhile; no class is changed.
    """
    kept = []
    with contextlib.ExitStack() as stack:
        for layer in _observed(model):
            own = vars(layer)
            if "call" in own:
                stack.callback(own.__setitem__, "call", own["call"])
            else:
                stack.callback(own.__delitem__, "call")
            own["call"] = _watched(layer, layer.call, kept)
        yield kept


def _watched(layer, call, kept):
    @functools.wraps(call)
    def watched_call(*args, **kwargs):
        outputs = call(*args, **kwargs)
        arrays = [_array(x) for x in tree.flatten(outputs) if x is not None]
        kept.append((layer.path or layer.name, arrays))
        return outputs

    return watched_call


def _observed(model):
    inside = {
        id(part)
        for layer in model._flatten_layers()
        if isinstance(layer, _LOOPS)
        for part in layer._flatten_layers(include_self=False)
    }
    layers = {id(layer): layer for layer in model._flatten_layers()}
    return [layer for key, layer in layers.items() if key not in inside]
