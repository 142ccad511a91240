"""Support for steps that torch's inductor compiles: `jit_compile=True`."""

import functools
import os

import torch
from keras.src.distribution.distribution_lib import distribution
from torch.distributed.tensor import DTensor

from keras_tp.backend.hooks import Hook
from keras_tp.backend.torch import placement
from keras_tp.backend.torch import processes


def check_compiler():
    """Raises if inductor cannot compile for this machine's processor.

    Raises:
        RuntimeError: if no C++ compiler is found.
    """
    if processes.uses_cuda():
        return
    # Imported late: it takes seconds, and few models are compiled.
    from torch._inductor import cpp_builder
    from torch._inductor import exc

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler as e:
        raise RuntimeError(
            "`jit_compile=True` has torch's inductor compile the model, which "
            "needs a C++ compiler, and none was found. Install one (g++ or "
            "clang++), name it in the environment variable CXX, or compile "
            "the model with `jit_compile=False`. Received: "
            f"CXX={os.environ.get('CXX')!r}; PATH={os.environ.get('PATH')!r}"
        ) from e


def fixed_shapes():
    """Returns a context without symbolic sizes, which DTensor cannot handle."""
    return torch._dynamo.config.patch(automatic_dynamic_shapes=False)


def _zeros_as_distributed(original):
    """Makes the gradient of an output that the loss does not use a DTensor.

    Autograd fills it with a plain tensor of zeros:
    https://github.com/pytorch/pytorch/issues/173123
    """

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


TABLE = [
    Hook(
        "torch._functorch._aot_autograd.runtime_wrappers:AOTDispatchAutograd",
        "process_runtime_tangent",
        _zeros_as_distributed,
        "a compiled step may have outputs that its loss does not use",
    ),
]
