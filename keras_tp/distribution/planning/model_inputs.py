"""The inputs of a model, and placeholder sizes for unknown dims."""

import inspect

import keras
from keras import tree
from keras.src.utils.tracking import TrackedList

# Placeholder for unknown dims of images (rank 4 on): large enough for strides.
IMAGE_SIZE = 64


class NoPlanError(ValueError):
    """Raised if a model cannot be planned, with the reason."""


def call_spec_of(model, given):
    """Returns `(args, kwargs)` of a call, with a `_Spec` for each tensor.

    Args:
        model: Keras model (or layer).
        given: Structure of shape tuples or `KerasTensor`s, the only argument
            of the call. `None` uses the inputs that the model knows.

    Raises:
        NoPlanError: if `given` is `None` and the inputs are not known.
    """
    if given is not None:
        spec = tree.map_shape_structure(_spec_of, _shapes_only(given))
        return (spec,), {}
    known = _known_call(model)
    if known is None:
        raise NoPlanError(
            f"The inputs of model {model.name!r} are not known. Pass "
            "`input_spec`: a shape tuple, such as (None, 128), a `KerasTensor` "
            "for a dtype other than float, or a nested structure of these. "
            f"Received: model={model}"
        )
    return known


def are_known(model):
    """Returns whether a model knows its inputs."""
    return _known_call(model) is not None


def note_call(model, call_spec):
    """Stores the shapes and dtypes of a model's first call.

    Args:
        model: Keras model.
        call_spec: Keras's `CallSpec`. First dims, of batches, become unknown.
    """
    if "_noted_call" in vars(model):
        return
    parameters = model._call_signature.parameters
    call = inspect.BoundArguments(
        model._call_signature,
        {
            name: value
            for name, value in call_spec.user_arguments_dict.items()
            if name in parameters and name != "training"
        },
    )
    vars(model)["_noted_call"] = tree.map_structure(
        _spec_of_batch, (call.args, call.kwargs)
    )


def _known_call(model):
    # A Functional model, or a Sequential one that was built.
    structure = getattr(model, "_inputs_struct", None)
    if structure is None:
        inner = getattr(model, "_functional", None)
        structure = getattr(inner, "_inputs_struct", None)
    if structure is not None:
        return (tree.map_structure(_spec_of, structure),), {}
    if "_noted_call" in vars(model):
        return vars(model)["_noted_call"]
    shapes = _untracked(getattr(model, "_build_shapes_dict", None))
    if shapes and len(shapes) == 1:
        shape = next(iter(shapes.values()))
        spec = tree.map_shape_structure(_spec_of, shape)
        if isinstance(spec, dict) and _takes_keywords_only(model):
            return (), spec
        return (spec,), {}
    if shapes and all(name.endswith("_shape") for name in shapes):
        return (), {
            name.removesuffix("_shape"): tree.map_shape_structure(
                _spec_of, shape
            )
            for name, shape in shapes.items()
        }
    return None


def _takes_keywords_only(model):
    """Returns whether `call` takes keywords, and names no parameter."""
    kinds = {p.kind for p in model._call_signature.parameters.values()}
    keywords = inspect.Parameter.VAR_KEYWORD
    return keywords in kinds <= {keywords, inspect.Parameter.VAR_POSITIONAL}


def _untracked(value):
    """Returns a structure without Keras's containers of attributes.

    Frameworks do not take those as the inputs of a model.
    """
    if isinstance(value, dict):
        return {key: _untracked(v) for key, v in value.items()}
    if isinstance(value, TrackedList):
        return [_untracked(v) for v in value]
    return value


def _spec_of_batch(x):
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        return x
    return _Spec((None, *x.shape[1:])[: len(x.shape)], dtype_of(x), None)


def dtype_of(x):
    """Returns the dtype of an array or tensor; `"string"` for text."""
    if getattr(x.dtype, "kind", None) in ("O", "S", "U"):
        # A numpy array of a dtype that Keras has no name for.
        return "string"
    return keras.backend.standardize_dtype(x.dtype)


class _Spec:
    def __init__(self, shape, dtype, name):
        self.shape, self.dtype, self.name = shape, dtype, name


def _shapes_only(given):
    """Wraps `KerasTensor`s, which `map_shape_structure` does not expect."""
    return tree.map_structure(
        lambda x: _spec_of(x) if hasattr(x, "shape") else x, given
    )


def _spec_of(x):
    if isinstance(x, _Spec):
        return x
    if hasattr(x, "shape"):
        dtype = keras.backend.standardize_dtype(x.dtype)
        return _Spec(tuple(x.shape), dtype, getattr(x, "name", None))
    return _Spec(tuple(x), keras.config.floatx(), None)


def narrow(spec, model):
    """Sets the sizes that the model's own `input_spec` fixes.

    Args:
        spec: Structure of `_Spec`, changed in place.
        model: Keras model (or layer).
    """
    wanted = tree.flatten(getattr(model, "input_spec", None))
    found = [x for x in tree.flatten(spec) if isinstance(x, _Spec)]
    for x, known in zip(found, wanted):
        shape = getattr(known, "shape", None)
        if shape is not None and len(shape) == len(x.shape):
            x.shape = tuple(
                size if size is not None else own
                for size, own in zip(x.shape, shape)
            )


def symbolic(spec, batch, length):
    """Returns `KerasTensor`s with placeholder sizes for unknown dims."""

    def one(x):
        if not isinstance(x, _Spec):
            return x
        rest = IMAGE_SIZE if len(x.shape) > 3 else length
        sizes = [rest if size is None else size for size in x.shape]
        if sizes and x.shape[0] is None:
            sizes[0] = batch
        return keras.KerasTensor(tuple(sizes), x.dtype, name=x.name)

    return tree.map_structure(one, spec)


def standing_sizes(model, spec):
    """Returns two primes that divide no known dim, for batch and length.

    The batch is not among the usual sizes of feature maps, and small, because
    some layers make states for each example. The length is small, because
    tables of positions limit it. It is 61 if no smaller prime is left.
    """
    taken = {size for variable in model.weights for size in variable.shape}
    for x in tree.flatten(spec):
        taken.update(size for size in getattr(x, "shape", ()) if size)
    lengths = (5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59)
    batches = (23, 29, 31, 37, 41, 43, 47, 53, 59)
    # A dim of this size is in no model.
    no_length = 1009

    def first(primes, otherwise):
        free = (p for p in primes if not any(size % p == 0 for size in taken))
        return next(free, otherwise)

    batch = first(batches, 67)
    if not any(map(_has_length, tree.flatten(spec))):
        return batch, no_length
    return batch, first([p for p in lengths if p != batch], 61)


def _has_length(x):
    shape = getattr(x, "shape", ())
    return len(shape) < 4 and None in shape[1:]
