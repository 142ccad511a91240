"""Notes in a graph what rematerialization computes again.

`keras.RematScope` gives each layer its mode. See `rematerialized_call` of
`keras.Layer`.
"""

import math

import keras
from keras import tree


def note(graph, layer, outputs, start):
    """Records whether the steps of a layer are computed again.

    The steps of a layer inside of another one are computed again with it.

    Args:
        graph: `Graph`, which has the steps of the layer by now.
        layer: The layer.
        outputs: Structure of what it returned.
        start: Int, the index of its first step.
    """
    mode = layer._remat_mode
    if mode is None:
        return
    is_again = mode.mode == "full" or (
        mode.mode == "larger_than"
        and _size(outputs) > mode.output_size_threshold
    )
    if is_again and isinstance(layer, keras.Model):
        # Its layers are computed again one by one, and keep their inputs.
        graph.is_again = True
    elif is_again or (
        mode.mode == "list_of_layers" and layer.name in mode.layer_names
    ):
        for step in graph.steps[start:]:
            step.again = start


def _size(outputs):
    return sum(
        math.prod(size or 1 for size in tensor.shape)
        for tensor in tree.flatten(outputs)
        if isinstance(tensor, keras.KerasTensor)
    )
