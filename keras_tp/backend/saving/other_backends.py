"""Classes in files that were saved on another backend."""

from keras.src import backend

from keras_tp.backend.hooks import around

_TORCH_OPTIMIZERS = "keras.src.backend.torch.optimizers."


@around
def hook_retrieve_class(
    original, name, registered_name, module, *args, **kwargs
):
    """Returns Keras's own optimizer for one that was saved on torch.

    Keras saves the class that computes with torch's tensors, and makes an
    optimizer of this class on each backend.
    """
    if backend.backend() != "torch" and (module or "").startswith(
        _TORCH_OPTIMIZERS
    ):
        module = "keras.optimizers"
    return original(name, registered_name, module, *args, **kwargs)
