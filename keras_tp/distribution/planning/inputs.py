"""What a model is called on, and the sizes that stand for unknown dims."""

import keras
from keras import tree

# Spatial dims of images that a model leaves open: deep enough for strides.
IMAGE_SIZE = 64


def input_spec_of(model, given):
    """Returns a structure of `(shape, dtype, name)` wrapped in `_Spec`."""
    if given is not None:
        return tree.map_shape_structure(_spec_of, _shapes_only(given))
    # A Functional model, or a Sequential one that was built.
    structure = getattr(model, "_inputs_struct", None)
    if structure is None:
        inner = getattr(model, "_functional", None)
        structure = getattr(inner, "_inputs_struct", None)
    if structure is not None:
        return tree.map_structure(_spec_of, structure)
    shapes = getattr(model, "_build_shapes_dict", None)
    if shapes and len(shapes) == 1:
        return tree.map_shape_structure(_spec_of, next(iter(shapes.values())))
    raise ValueError(
        f"The inputs of model {model.name!r} are not known. Pass "
        "`input_spec`: a shape tuple, such as (None, 128), a `KerasTensor` "
        "where the dtype is not that of floats, or a structure of them as the "
        f"model takes it. Received: model={model}"
    )


class _Spec:
    def __init__(self, shape, dtype, name):
        self.shape, self.dtype, self.name = shape, dtype, name


def _shapes_only(given):
    """KerasTensors in `map_shape_structure` are not shapes: wraps them."""
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


def symbolic(spec, batch, length):
    """Returns `KerasTensor`s in which the unknown dims have these sizes."""

    def one(x):
        rest = IMAGE_SIZE if len(x.shape) > 3 else length
        sizes = [rest if size is None else size for size in x.shape]
        if sizes and x.shape[0] is None:
            sizes[0] = batch
        return keras.KerasTensor(tuple(sizes), x.dtype, name=x.name)

    return tree.map_structure(one, spec)


def standing_sizes(model, spec):
    """Returns two primes that divide no dim of a variable or input."""
    taken = {size for variable in model.weights for size in variable.shape}
    for x in tree.flatten(spec):
        taken.update(size for size in x.shape if size)
    found = []
    for prime in (3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59):
        if not any(size % prime == 0 for size in taken):
            found.append(prime)
    found += [61, 67]
    return found[0], found[1]
