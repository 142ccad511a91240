"""The gradients of a tensor that several products read.

DTensor sums the gradient of a product over the devices in the operation that
computes it. Where only such gradients are added up, as those of queries, keys
and values, it sums over the devices once. Where others are among them, such as
that of a residual connection or of a router of experts, it would sum each.
"""

from tensorflow.experimental import dtensor

from keras_tp.backend.hooks import around
from keras_tp.backend.tensorflow import placement

_PRODUCTS = ("MatMul", "BatchMatMul", "BatchMatMulV2", "Einsum")
# What may stand between the product and its gradient.
_VIEWS = ("Cast", "Identity", "Reshape", "Transpose")


@around
def hook_add_n(original, inputs, name=None):
    """Adds up the gradients that are summed first, and then the others."""
    if placement.current_mesh() is None or len(inputs) < 3:
        return original(inputs, name=name)
    products = [x for x in inputs if _is_of_a_product(x)]
    others = [x for x in inputs if not any(x is y for y in products)]
    if len(products) < 2 or not others:
        return original(inputs, name=name)
    return original([*others, original(products)], name=name)


def _is_of_a_product(x):
    """Returns whether a tensor of a graph is the result of a product.

    A product with a variable that is whole is none, as nothing is summed.
    """
    operation = getattr(x, "op", None)
    while operation is not None and operation.type in _VIEWS:
        operation = operation.inputs[0].op
    if operation is None or operation.type not in _PRODUCTS:
        return False
    known = [placement.specs_of(factor) for factor in operation.inputs]
    known = [specs for specs in known if specs is not None]
    return not known or any(
        axis != dtensor.UNSHARDED for specs in known for axis in specs
    )
