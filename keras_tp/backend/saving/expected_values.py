"""Variables whose first value comes from a file, so that none is drawn.

A process that draws the first value of a variable holds all of it for a moment.
While a model is made to be loaded, its large variables start as zeros, and each
process makes its own parts. A variable is drawn after all if it is read before
it is loaded, or if the file has no value for it.
"""

import contextlib
import math

from keras.src.backend.common.stateless_scope import in_stateless_scope
from keras.src.random.seed_generator import SeedGenerator

# Smaller values are drawn as always.
_LARGE_NUMBERS = 2**18


class _Expected:
    """What is expected.

    Attributes:
        depth: Int. Number of the contexts that are open.
        variables: List of the variables that were made in them.
        is_needed: Bool, whether a value that is asked for has to be drawn.
    """

    def __init__(self):
        self.depth, self.variables, self.is_needed = 0, [], True


_expected = _Expected()


@contextlib.contextmanager
def context():
    """Context in which variables are made that a file has values for.

    At its end, those that were not loaded are drawn.
    """
    _expected.depth += 1
    variables = _expected.variables
    try:
        yield
    finally:
        _expected.depth -= 1
        if not _expected.depth:
            # After an error, what is left of the model draws its values if they
            # are read.
            _expected.variables = []
    if not _expected.depth:
        for variable in variables:
            draw(variable)


def is_expected(variable, initializer, layout):
    """Returns whether a variable starts as zeros, and notes that.

    Args:
        variable: Keras variable that is being made. It has its shape.
        initializer: Function of a shape and `dtype`.
        layout: `TensorLayout` of the variable, or `None`.
    """
    if (
        not _expected.depth
        or getattr(layout, "axes", None) is None
        or math.prod(variable._shape) < _LARGE_NUMBERS
        # Its state would change in another order.
        or isinstance(getattr(initializer, "seed", None), SeedGenerator)
    ):
        return False
    variable._undrawn = initializer
    _expected.variables.append(variable)
    return True


def is_waiting(variable):
    """Returns whether the zeros of a variable are not its value."""
    return getattr(variable, "_undrawn", None) is not None


def draw(variable):
    """Gives a variable its first value, if it was neither loaded nor drawn."""
    initializer = vars(variable).get("_undrawn")
    if initializer is None or not _expected.is_needed or in_stateless_scope():
        return
    variable.assign(initializer(variable._shape, dtype=variable._dtype))


@contextlib.contextmanager
def not_needed():
    """Context in which a value is asked for, but not what it is."""
    before, _expected.is_needed = _expected.is_needed, False
    try:
        yield
    finally:
        _expected.is_needed = before


@contextlib.contextmanager
def loaded(variable):
    """Context in which a variable is assigned."""
    initializer = vars(variable).get("_undrawn")
    if initializer is None:
        yield
        return
    variable._undrawn = None
    with contextlib.ExitStack() as after_an_error:
        after_an_error.callback(setattr, variable, "_undrawn", initializer)
        yield
        after_an_error.pop_all()


class Loader:
    """The methods of a loader of presets that make models."""

    def load_backbone(original, self, cls, load_weights, *args, **kwargs):
        with context() if load_weights else contextlib.nullcontext():
            return original(self, cls, load_weights, *args, **kwargs)

    load_task = load_backbone
