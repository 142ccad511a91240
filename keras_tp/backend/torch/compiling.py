"""Steps that torch's inductor compiles: `jit_compile=True`."""

import os

import torch

from keras_tp.backend.torch import processes


def check_compiler():
    """Raises if inductor cannot compile for this machine's processor.

    Raises:
        RuntimeError: if there is no C++ compiler, with the ways out.
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
    """Context manager: symbolic sizes do not go into DTensor's placements."""
    return torch._dynamo.config.patch(automatic_dynamic_shapes=False)
