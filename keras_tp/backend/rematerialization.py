"""The row for `keras.remat`, which each backend fills in."""

import functools

from keras.src.backend.common.keras_tensor import any_symbolic_tensors
from keras.src.distribution.distribution_lib import distribution

from keras_tp.backend.hooks import Hook
from keras_tp.backend.hooks import around


def row(backend, keeping=None):
    """Returns the row that replaces `remat` of a backend of Keras.

    A plan is made from the operations of the function. Plain Keras cannot call
    it with symbolic tensors.

    Args:
        backend: String, name of a module in `keras.src.backend`.
        keeping: Callable. It takes a function, and the function that plain
            Keras makes of it, and returns one that runs under a distribution.
            It keeps the results of collectives for the backward pass. Defaults
            to `None`: that of plain Keras runs.
    """

    @around
    def replace(original, f):
        plain = original(f)
        split = plain if keeping is None else keeping(f, plain)

        @functools.wraps(plain)
        def remat(*args, **kwargs):
            if any_symbolic_tensors(args, kwargs):
                return f(*args, **kwargs)
            run = plain if distribution() is None else split
            return run(*args, **kwargs)

        return remat

    return Hook(
        f"keras.src.backend.{backend}.core",
        "remat",
        replace,
        "a backward pass repeats no collective, and plans see the function",
    )
