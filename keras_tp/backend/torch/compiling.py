"""Support for steps that torch's inductor compiles: `jit_compile=True`."""

import functools
import os
import warnings

import numpy as np
import torch
from keras.src import tree
from keras.src.backend.torch import core
from keras.src.distribution.distribution_lib import distribution
from torch.distributed.tensor import DTensor

from keras_tp.backend.torch import placement
from keras_tp.backend.torch import processes


def checked(step):
    """Returns a compiled step that has no symbolic sizes and no arrays.

    DTensor cannot handle symbolic sizes. The arrays that `train_on_batch`
    passes would break the graph.

    Raises:
        RuntimeError: if no C++ compiler is found for this machine's processor.
    """
    check_compiler()
    compiled = torch._dynamo.config.patch(automatic_dynamic_shapes=False)(step)

    @functools.wraps(step)
    def run(data):
        return compiled(tree.map_structure(_as_tensor, data))

    return run


def _as_tensor(value):
    if isinstance(value, np.ndarray):
        return core.convert_to_tensor(value)
    return value


def without_jit_compile(model):
    """Turns off `jit_compile` for models that need eager steps, and warns."""
    reason = _why_eager(model) if model.jit_compile else None
    if reason:
        warnings.warn(
            f"Model {model.name!r} does not support `jit_compile=True` under a "
            f"distribution, because {reason}. Proceeding with "
            "`jit_compile=False`.",
            stacklevel=2,
        )
        model.jit_compile = False


def _why_eager(model):
    """Returns why the steps of a model are not compiled, or `None`."""
    again = [
        layer.path
        for layer in model._flatten_layers()
        if layer._remat_mode is not None
    ]
    if again:
        # torch's compiler loses the gradients of split variables in it.
        return f"layer {again[0]!r} was made in a `keras.RematScope`"
    if not all(layer.built for layer in model._flatten_layers()):
        return None
    for variable in model.variables:
        # The first read of a value plans the model.
        _ = variable.value
        if getattr(variable._layout, "sequence_parallel", False):
            # Compiled steps would hold whole activations.
            return f"{variable.path!r} uses sequence parallelism"
    return None


def check_compiler():
    """Raises if inductor finds no C++ compiler for this machine."""
    if processes.uses_cuda():
        return
    # Imported late: it takes seconds, and few models are compiled.
    from torch._inductor import cpp_builder
    from torch._inductor import exc

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler as e:
        raise RuntimeError(
            "`jit_compile=True` compiles the model with torch's inductor, "
            "which finds no C++ compiler. Install one (g++ or clang++), set "
            "the environment variable CXX to one, or compile the model with "
            f"`jit_compile=False`. Received: CXX={os.environ.get('CXX')!r}; "
            f"PATH={os.environ.get('PATH')!r}"
        ) from e


def hook_can_use_flash_attention(original):
    """Leaves the choice of an attention kernel to torch in compiled steps.

    What Keras asks torch cannot be traced: the graph breaks at each attention,
    and the layers around it run eagerly. torch chooses again when the
    operation runs.
    """

    @functools.wraps(original)
    def _can_use_flash_attention(*args, raise_error=False, **kwargs):
        if torch.compiler.is_compiling() and not raise_error:
            return False
        return original(*args, raise_error=raise_error, **kwargs)

    return _can_use_flash_attention


def hook_tangent(original):
    """Makes the gradient of an output that the loss does not use a DTensor.

    Autograd fills it with a plain tensor of zeros:
    https://github.com/pytorch/pytorch/issues/173123
    """

    # It runs between compiled parts of a step, and cannot be traced.
    @torch.compiler.disable
    @functools.wraps(original)
    def process_runtime_tangent(x, meta, *args, **kwargs):
        # Only the metadata of tensor subclasses has this attribute.
        expected = getattr(meta, "original_subclass_type", None)
        if expected is DTensor and type(x) is torch.Tensor and not x.any():
            x = _filled_like(x, meta.meta[0])
        return original(x, meta, *args, **kwargs)

    return staticmethod(process_runtime_tangent)


# It must not be compiled.
@torch.compiler.disable
def _filled_like(zeros, placements):
    mesh = placement.to_torch_mesh(distribution().device_mesh)
    whole = placement.Placement(mesh, placements)
    return placement.filled(zeros.shape, 0, zeros.dtype, whole)
