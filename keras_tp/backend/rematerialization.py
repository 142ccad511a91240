"""What backends share for `keras.remat`.

A function that is computed again in the backward pass must compute the same:
`Dropout` has to draw the same numbers, and averages must not move twice. So the
first pass notes the values that variables have before it and after it, and the
second pass starts from the former and changes nothing.
"""

import functools

from keras.src import tree
from keras.src.backend.common import stateless_scope
from keras.src.backend.common.keras_tensor import any_symbolic_tensors
from keras.src.backend.common.variables import initialize_all_variables
from keras.src.distribution.distribution_lib import distribution
from keras.src.layers.layer import Layer

from keras_tp.backend.hooks import Hook
from keras_tp.backend.hooks import around


class Pass(stateless_scope.StatelessScope):
    """Runs a function, and keeps what it changes.

    Args:
        before: List of pairs of a variable and the value that it has for the
            function. Others have the value of the scope around it. Defaults to
            `()`.
    """

    def __init__(self, before=()):
        # Values that are made in a trace must not be kept.
        super().__init__(initialize_variables=False)
        outer = stateless_scope.get_stateless_scope()
        self.collect_losses = outer is None or outer.collect_losses
        if outer is not None:
            self.state_mapping = dict(outer.state_mapping)
        for variable, value in before:
            self.state_mapping[id(variable)] = value
        self._changed = {}

    def add_update(self, update):
        super().add_update(update)
        variable, _ = update
        self._changed[id(variable)] = variable

    @property
    def changed(self):
        """List of the variables that the function assigned to."""
        return list(self._changed.values())

    @property
    def values(self):
        """List of the last values of `changed`."""
        return [self.get_current_value(v) for v in self._changed.values()]


def part(args, kwargs, is_tensor):
    """Parts the tensors of a call from what is no tensor, such as `training`.

    Args:
        args: Tuple of the positional arguments, structures of any values.
        kwargs: Dict of the others.
        is_tensor: Callable that tells of a value whether it is a tensor.

    Returns:
        List of the tensors, and a function that takes such a list and returns
        `args` and `kwargs` with its tensors in them.
    """
    leaves = tree.flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if is_tensor(leaf)]

    def whole(tensors):
        merged = list(leaves)
        for i, tensor in zip(places, tensors, strict=True):
            merged[i] = tensor
        return tree.pack_sequence_as((args, kwargs), merged)

    return [leaves[i] for i in places], whole


def apply(f, first, values, losses):
    """Does what a function would have done outside of `Pass`.

    Args:
        f: The function.
        first: The `Pass` in which it ran.
        values: List of the new values of `first.changed`.
        losses: List of tensors, what `first.losses` are outside of a trace.
    """
    if not stateless_scope.in_stateless_scope():
        initialize_all_variables()
    for variable, value in zip(first.changed, values):
        variable.assign(value)
    for inner, loss in zip(first.losses, losses):
        _add_loss(f, inner, loss)


def _add_loss(f, inner, loss):
    layer = getattr(f, "__self__", None)
    if not isinstance(layer, Layer):
        raise NotImplementedError(
            "A function in `keras.remat` cannot call `add_loss`: its layer is "
            "not known. Add the loss outside of the function. Received: "
            f"function={f!r}"
        )
    for each in layer._flatten_layers():
        if id(inner) in each._loss_ids:
            each._loss_ids.remove(id(inner))
            each.add_loss(loss)


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
