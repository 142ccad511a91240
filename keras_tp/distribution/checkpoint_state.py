"""The state of a model by the names of its tensors, and the parts of them."""

import collections
import warnings

import keras
import numpy as np
from keras import layers
from keras.src import backend as keras_backend
from keras.src.layers.convolutional.base_conv import BaseConv
from keras.src.saving import saving_lib
from keras.src.saving.keras_saveable import KerasSaveable
from keras.src.utils import naming

from keras_tp.backend.saving import boxes
from keras_tp.backend.saving import checkpoint_folder
from keras_tp.backend.saving import tensor_files
from keras_tp.distribution import model_state
from keras_tp.distribution import variable_origin

# Methods that only assign the variables that were saved.
_PLAIN = [
    layer.load_own_variables
    for layer in (
        layers.Layer,
        layers.Dense,
        layers.EinsumDense,
        layers.Embedding,
        BaseConv,
    )
]
# Path of what Keras does not save: counters of random seeds, and metrics.
REST = "state"
# Path of the optimizer's variables.
_OPTIMIZER = "optimizer/"
# Path of files, such as vocabularies. No attribute of a model has this name.
ASSETS = "@assets"


def state_of(model, folder=None, is_new=False):
    """Returns the state of a model, under the names that Keras gives it.

    A collective if a layer saves values that are not its variables.

    Args:
        model: Built `keras.Model`.
        folder: `CheckpointFolder` that is loaded. Its names have to be the
            same. Defaults to `None`.
        is_new: Boolean, whether the model was made of the config in the folder.
            If that was saved before the first step, it has no slots. Defaults
            to `False`.

    Returns:
        List with, for each tensor: its name, the variable or the array, and
        the layer if it loads what it saved by itself.
    """
    found, seen = [], set()
    for path, saveable in parts_of(model):
        values = _own_variables(saveable)
        owner = None
        if values is None:
            owner, values = saveable, {}
            saveable.save_own_variables(values)
        for key, value in values.items():
            name = f"{path}/vars/{key}".lstrip("/")
            if isinstance(value, keras.Variable):
                seen.add(id(value))
            else:
                value = np.asarray(keras_backend.convert_to_numpy(value))
            found.append((name, value, owner))
    counts = collections.Counter()
    for variable, role in model_state.variables_of(model):
        if id(variable) not in seen:
            name = f"{REST}/{role}/{counts[role]}"
            found.append((name, variable, None))
            counts[role] += 1
    if folder is None:
        return found
    if is_new:
        found = [
            row
            for row in found
            if row[0] in folder.tensors or not row[0].startswith(_OPTIMIZER)
        ]
    return _fitting(found, folder, model)


def parts_of(model):
    """Yields the paths and the parts of a model, itself included."""
    return _walk(model, "", set())


def _walk(saveable, path, visited):
    """Yields the paths and the parts of a model that Keras saves."""
    if id(saveable) in visited:
        return
    visited.add(id(saveable))
    if isinstance(saveable, KerasSaveable):
        yield path, saveable
        children = saving_lib._walk_saveable(saveable)
    else:
        names, children = {}, []
        if isinstance(saveable, dict):
            saveable = saveable.values()
        for child in saveable:
            # Names are those of classes. Names of layers may differ between
            # two instances of a model.
            name = "container"
            if isinstance(child, KerasSaveable):
                name = naming.to_snake_case(type(child).__name__)
            children.append((saving_lib._get_unique_name(name, names), child))
    for name, child in children:
        if isinstance(child, (KerasSaveable, list, dict, tuple)):
            yield from _walk(child, f"{path}/{name}", visited)


def _own_variables(saveable):
    """Returns a dict of the variables that can be saved as they are.

    `None` if a layer has its own way to save and load them.
    """
    if isinstance(saveable, keras.optimizers.Optimizer):
        own = saveable.variables
    elif not hasattr(saveable, "save_own_variables"):
        return {}
    elif type(saveable).load_own_variables in _PLAIN:
        # With LoRA, Keras saves the product and loses the adapters.
        own = saveable._trainable_variables + saveable._non_trainable_variables
    else:
        return None
    return {str(i): variable for i, variable in enumerate(own)}


def _fitting(state, folder, model):
    """Returns the state that a folder has; raises if names differ."""
    own = {name for name, *_ in state}
    saved = {n for n in folder.tensors if not n.startswith(f"{ASSETS}/")}
    differing = own ^ saved
    # Metrics have no variables before the first step, and a model that only
    # predicts has no optimizer.
    optional = [f"{REST}/{variable_origin.METRIC}/"]
    if getattr(model, "optimizer", None) is None:
        optional.append(_OPTIMIZER)
    left_out = tuple(
        path
        for path in optional
        if any(name.startswith(path) for name in differing)
    )
    names = sorted(n for n in differing if not n.startswith(left_out))
    if names:
        text = "lacks {!r}, which the model has"
        if names[0] not in own:
            text = "has {!r}, which the model lacks"
        raise ValueError(
            f"The checkpoint in '{folder.path}' does not fit the model: it "
            f"{text.format(names[0])}. Build and compile the model as when it "
            f"was saved. Received: {len(names)} names that only one of them has"
        )
    return [row for row in state if not row[0].startswith(left_out)]


def build_optimizer(model, folder):
    """Builds the optimizer if the folder has its slots."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None or optimizer.built:
        return
    if f"optimizer/vars/{len(optimizer.variables)}" in folder.tensors:
        with model_state.entered(model):
            optimizer.build(model.trainable_variables)


def written_pieces(lib, name, value):
    """Yields a `Piece` for each box of a tensor that this process writes.

    Its function holds no array, so that one variable at a time is in the
    host's memory.
    """
    shape = tuple(value.shape)
    dtype = keras_backend.standardize_dtype(value.dtype)
    if not tensor_files.can_hold(dtype):
        raise ValueError(
            f"safetensors has no dtype for {name!r}. Received: dtype={dtype!r}"
        )

    def piece(box, read):
        return checkpoint_folder.Piece(name, shape, dtype, box, read)

    if not isinstance(value, keras.Variable):
        if lib.process_id() == 0:
            yield piece(tuple((0, size) for size in shape), lambda: value)
        return
    for ranges, is_written, read_part in lib.variable_parts(value):
        for box, position in boxes.boxes_of(ranges) if is_written else ():

            def read(read_part=read_part, position=position):
                return read_part()[position]

            yield piece(box, read)


def held_boxes(lib, value, whole=None):
    """Returns the boxes of a tensor that the devices of this process hold.

    All of the tensor, if `whole` is given: a layer that takes whole arrays.
    """
    if whole is not None or not isinstance(value, keras.Variable):
        return [tuple((0, size) for size in value.shape)]
    return [
        box
        for ranges, *_ in lib.variable_parts(value)
        for box, _ in boxes.boxes_of(ranges)
    ]


def check_fits(folder, state):
    """Compares shapes and dtypes; warns of floats that are converted."""
    converted = []
    for name, value, _ in state:
        shape, dtype = folder.tensors[name]
        held = keras_backend.standardize_dtype(value.dtype)
        path = getattr(value, "path", name)
        if shape != tuple(value.shape) or _kind(dtype) != _kind(held):
            raise ValueError(
                f"The checkpoint in '{folder.path}' does not fit the model: "
                f"{name!r} was saved as {dtype} of shape {shape}, but {path!r} "
                f"is {held} of shape {tuple(value.shape)}."
            )
        if dtype != held and _kind(dtype) == "float":
            converted.append(f"{path!r} from {dtype} to {held}")
    if converted:
        warnings.warn(
            f"The checkpoint in '{folder.path}' has other dtypes than the "
            f"model. Loading converts {converted[0]}. Received: "
            f"{len(converted)} such variables",
            stacklevel=4,
        )


def _kind(dtype):
    if keras_backend.is_float_dtype(dtype):
        return "float"
    # JAX has steps of 32 bits, TensorFlow of 64.
    return "int" if keras_backend.is_int_dtype(dtype) else dtype


def reader(folder, name, value):
    """Returns a function that reads the part of a tensor in some ranges."""
    dtype = keras_backend.standardize_dtype(value.dtype)

    def part_of(ranges):
        return boxes.read_part(
            ranges,
            tensor_files.numpy_dtype(dtype),
            lambda target, box: folder.copy_to(target, name, box),
        )

    return part_of


def load_owners(folder, state):
    """Lets layers load by themselves what they saved by themselves."""
    stores = {}
    for name, value, owner in state:
        if owner is not None:
            whole = tuple([(0, size)] for size in value.shape)
            _, store = stores.setdefault(id(owner), (owner, {}))
            read = reader(folder, name, value)
            store[name.rpartition("/")[2]] = read(whole)
    for owner, store in stores.values():
        owner.load_own_variables(store)
