"""Compares a distributed model with a second model on one device."""

import collections

import numpy as np
from keras import tree

from keras_tp import backend
from keras_tp.distribution import reference_run
from keras_tp.distribution.arguments import check_distribution
from keras_tp.distribution.planning import tables
from keras_tp.distribution.planning.discarded import no_trace_left

# A sum over devices is rounded in another order, and later layers add to the
# error. A layer diverges beyond this many times the tolerance.
_LAYER_FACTOR = 10
# A gradient below this fraction of the largest one of its variable, or of the
# model, is rounding error. Optimizers that divide by its size make full steps
# of it.
_ROUNDING = 1e-3
_ROUNDING_OF_MODEL = 1e-6
_EPSILON = float(np.finfo("float32").eps)

INITIAL = "initial values"
FORWARD = "forward pass"
UPDATE = "first update"
FINAL = "final weights"


class WeightDifference(
    collections.namedtuple(
        "WeightDifference", "path layer difference compared size"
    )
):
    """The difference of a weight from the reference after the last step.

    Args:
        path: String.
        layer: String, path of its layer.
        difference: Float, the largest `|a - b| / max(1, |b|)`.
        compared: Int, number of its elements that were compared. If the
            optimizer has slots, elements whose gradient is rounding error are
            left out: Adam and similar optimizers make full steps of it.
        size: Int, number of its elements.
    """


class VerificationReport:
    """The result of `verify`. `print` shows a table.

    Args:
        rtol: Float, the tolerance.
        losses: List of pairs of floats, one for each step: the loss on one
            device and the distributed loss.
        weights: List of `WeightDifference`.
        outputs: List of `(layer path, difference)`, in the order of the first
            forward pass: the largest difference of the layer's outputs,
            relative to the largest output.
        divergence: Pair of `layer` and `where`, or `None`.

    Attributes:
        passed: Boolean. Whether nothing diverges: losses and weights are
            within `rtol`, weights relative to `max(1, |w|)`.
        layer: String, path of the first layer that diverges; `None` if none.
        where: One of `"initial values"`, `"forward pass"`, `"first update"`
            and `"final weights"`; `None` if no layer diverges. Updates are
            compared in the order of the backward pass, so the layer is the
            last one of the model with a wrong gradient. Either this gradient
            is wrong, or the gradients that arrive from the layers that use
            its output.
        loss_difference: Float, the largest relative difference of a loss.
        weight_difference: Float, the largest difference of a weight.
    """

    def __init__(self, rtol, losses, weights, outputs, divergence):
        self.rtol = rtol
        self.losses = losses
        self.weights = weights
        self.outputs = outputs
        self.layer, self.where = divergence or (None, None)
        self.passed = divergence is None
        self.loss_difference = max(_relative(a, b) for b, a in losses)
        self.weight_difference = max(w.difference for w in weights)

    def __repr__(self):
        found = f"layer={self.layer!r}, where={self.where!r}, "
        return (
            f"<{self.__class__.__name__} passed={self.passed}, "
            f"{'' if self.passed else found}"
            f"loss_difference={self.loss_difference:.2g}, "
            f"weight_difference={self.weight_difference:.2g}, "
            f"rtol={self.rtol:g}>"
        )

    def __str__(self):
        steps = [
            (
                str(step),
                f"{plain:.8g}",
                f"{own:.8g}",
                f"{_relative(own, plain):.2g}",
            )
            for step, (plain, own) in enumerate(self.losses, 1)
        ]
        furthest = sorted(self.weights, key=lambda w: -w.difference)[:10]
        weights = [
            (w.path, f"{w.difference:.2g}", f"{w.compared} of {w.size}")
            for w in furthest
        ]
        headings = "step", "one device", "distributed", "difference"
        return tables.text_of(
            (repr(self), dict.fromkeys(headings, tables.RIGHT), steps),
            (
                None,
                dict.fromkeys(
                    ("weight", "difference", "compared"), tables.FOLD
                ),
                weights,
            ),
        )


def verify(
    build_fn,
    distribution,
    x,
    y,
    steps=5,
    batch_size=None,
    seed=0,
    rtol=1e-5,
):
    """Trains a model under a distribution, and a second model on one device.

    The second model is the reference. It is trained in a child process without
    a distribution, so that an error in this process cannot reach it. The child
    imports the module that defines `build_fn`. If that is the script itself,
    its other code must be below `if __name__ == "__main__":`. On accelerators
    both processes need memory (JAX: set
    `XLA_PYTHON_CLIENT_PREALLOCATE=false`).

    Both start with one forward pass in training mode, in which the outputs of
    each layer are recorded, and then take their steps. In a run of several
    processes, every process must call this; the first one starts the child.
    The random state of Keras, NumPy and Python, name counters and the current
    distribution are restored afterwards.

    Example:

    ```python
    def build():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
        model.compile("sgd", "mse")
        return model

    if __name__ == "__main__":
        report = verify(build, TensorParallel(), x, y)
        assert report.passed, report
    ```

    Args:
        build_fn: Callable without arguments that returns a compiled Keras
            model, from a module that a child process can import. An existing
            model can be saved and built by
            `functools.partial(keras.models.load_model, path)`.
        distribution: `Distribution`.
        x: Inputs, a structure of arrays.
        y: Targets, a structure of arrays.
        steps: Int, number of training steps. Defaults to 5.
        batch_size: Int. Batches follow each other and start again at the end
            of the data. Defaults to all of `x` in every step.
        seed: Int, seed of initial values and dropout. Defaults to 0.
        rtol: Float, the tolerance. Defaults to `1e-5`.

    Returns:
        A `VerificationReport`; the same in every process.

    Raises:
        ValueError: if a child process cannot import `build_fn`, or the model
            is not compiled or differs between the two processes.
        RuntimeError: if the child process fails.
    """
    check_distribution(distribution)
    reference_run.check_picklable(build_fn)
    x, y = tree.map_structure(np.asarray, (x, y))
    if steps < 1:
        raise ValueError(f"`steps` must be 1 or more. Received: steps={steps}")
    backend.distribution_lib.meet("`verify`")
    if batch_size is None:
        batch_size = len(tree.flatten(x)[0])
    arguments = (build_fn, x, y, steps, batch_size, seed)
    reference = _train_reference(*arguments)
    with no_trace_left(), distribution.scope():
        run = reference_run.train(*arguments)
    return compare(reference, run, rtol)


def _train_reference(*arguments):
    """Trains a second model in a child of the first process. A collective."""
    lib = backend.distribution_lib
    child = reference_run.Child(*arguments) if lib.process_id() == 0 else None
    # Short collectives in a loop, because a long wait in one would time out.
    while not lib.from_first_process(child and child.has_ended(1.0)):
        pass
    result = reference_run.sent(
        lib.from_first_process(child and child.result())
    )
    if not isinstance(result, reference_run.Run):
        raise RuntimeError(
            "The child process that trains the model on one device ended with "
            f"exit code {result}; its error is printed above. If it ran your "
            "script again, move the script's code below `if __name__ == "
            '"__main__":`; if it did not find `build_fn`, move `build_fn` into '
            f"a module that can be imported. Received: build_fn={arguments[0]}"
        )
    return result


def compare(reference, run, rtol):
    """Returns the `VerificationReport` of two runs of one model."""
    _check_alike(reference, run)
    compared = _compared_elements(reference)
    weights = _weight_differences(reference, run, compared)
    losses = list(zip(reference.losses, run.losses))
    outputs = [
        (path, max(map(_of_largest, arrays, expected), default=0.0))
        for (path, arrays), (_, expected) in zip(run.outputs, reference.outputs)
    ]
    # Not `>`: a difference may be NaN.
    if all(_relative(a, b) <= rtol for b, a in losses) and all(
        weight.difference <= rtol for weight in weights
    ):
        divergence = None
    else:
        divergence = (
            _first_initial(reference, run, rtol)
            or _first_output(outputs, rtol)
            or _first_update(reference, run, compared, rtol)
            or (max(weights, key=_nan_first).layer, FINAL)
        )
    return VerificationReport(rtol, losses, weights, outputs, divergence)


def _check_alike(reference, run):
    shapes, expected = (
        [
            (weight.path, value.shape)
            for weight, value in zip(each.weights, each.values[0])
        ]
        for each in (run, reference)
    )
    calls = len(run.outputs), len(reference.outputs)
    if calls[0] != calls[1] or [s for _, s in shapes] != [
        s for _, s in expected
    ]:
        raise ValueError(
            "`build_fn` must build the same model every time. Under the "
            "distribution, the model has other weights or another number of "
            f"layer calls than on one device. Received: {calls[0]} calls and "
            f"the weights {shapes}; on one device {calls[1]} calls and the "
            f"weights {expected}"
        )


def _weight_differences(reference, run, compared):
    rows = []
    for weight, mask, a, b in zip(
        run.weights, compared, run.values[2], reference.values[2]
    ):
        a, b = a.astype("float64"), b.astype("float64")
        difference = np.abs(a - b) / np.maximum(1.0, np.abs(b))
        rows.append(
            WeightDifference(
                weight.path,
                weight.layer,
                float(np.max(difference[mask], initial=0.0)),
                int(mask.sum()),
                mask.size,
            )
        )
    return rows


def _compared_elements(reference):
    """Returns masks of the elements whose gradient exceeds rounding error."""
    largest = collections.defaultdict(float)
    for arrays in reference.slots:
        for kind, slot in enumerate(arrays):
            size = float(np.max(np.abs(slot), initial=0.0))
            largest[kind] = max(largest[kind], size)
    masks = []
    for arrays, value in zip(reference.slots, reference.values[0]):
        mask = np.full(value.shape, not arrays)
        for kind, slot in enumerate(arrays):
            if slot.shape == value.shape:
                size = np.abs(slot)
                own = float(np.max(size, initial=0.0))
                if own > _ROUNDING_OF_MODEL * largest[kind]:
                    # An element without a gradient keeps its value.
                    mask |= (size > _ROUNDING * own) | (size == 0)
            else:
                # A factored slot has no entry for each element.
                mask[...] = True
        masks.append(mask)
    return masks


def _order_of(run):
    """Returns a sort key of layers: the order of the forward pass."""
    order = {path: i for i, (path, _) in enumerate(run.outputs)}
    return lambda layer: order.get(layer, len(order))


def _first_initial(reference, run, rtol):
    wrong = [
        weight.layer
        for weight, a, b in zip(run.weights, run.values[0], reference.values[0])
        if not _of_largest(a, b) <= rtol
    ]
    return (min(wrong, key=_order_of(run)), INITIAL) if wrong else None


def _first_output(outputs, rtol):
    for path, difference in outputs:
        if not difference <= _LAYER_FACTOR * rtol:
            return path, FORWARD
    return None


def _first_update(reference, run, compared, rtol):
    """Finds the first wrong update: in buffers, then in the backward pass."""
    order = _order_of(run)
    buffers, gradients = [], []
    for index, weight in enumerate(run.weights):
        if weight.trainable and not compared[index].any():
            # All of its gradient is rounding error.
            continue
        if weight.trainable and run.slots[index]:
            same = _alike(reference, run, index) and all(
                _of_largest(a, b) <= _LAYER_FACTOR * rtol
                for a, b in zip(run.slots[index], reference.slots[index])
            )
        else:
            same = _same_update(reference, run, index, rtol)
        if not same and weight.trainable:
            gradients.append((-order(weight.layer), weight.layer))
        elif not same:
            buffers.append((order(weight.layer), weight.layer))
    wrong = buffers or gradients
    return (min(wrong)[1], UPDATE) if wrong else None


def _updates(reference, run, index):
    for each in (run, reference):
        before, after = (each.values[k][index] for k in (0, 1))
        yield after.astype("float64") - before


def _same_update(reference, run, index, rtol):
    """Whether an update that is linear in the gradient is the reference's."""
    a, b = _updates(reference, run, index)
    size = float(np.max(np.abs(b), initial=0.0))
    value = float(np.max(np.abs(reference.values[0][index]), initial=0.0))
    allowed = _LAYER_FACTOR * rtol * size + 4 * _EPSILON * max(1.0, value)
    return bool(np.max(np.abs(a - b), initial=0.0) <= allowed)


def _alike(reference, run, index):
    """Whether an update is the reference's on average; few elements may not."""
    a, b = _updates(reference, run, index)
    allowed = 0.01 * np.mean(np.abs(b)) + 4 * _EPSILON
    return bool(np.mean(np.abs(a - b)) <= allowed)


def _relative(a, b):
    return abs(a - b) / abs(b) if b else abs(a)


def _of_largest(a, b):
    """Returns the largest difference, relative to the largest number in `b`."""
    a, b = np.asarray(a, "float64"), np.asarray(b, "float64")
    if a.shape != b.shape:
        return float("inf")
    size = float(np.max(np.abs(b), initial=0.0))
    difference = float(np.max(np.abs(a - b), initial=0.0))
    return difference / size if size else difference


def _nan_first(weight):
    return np.nan_to_num(weight.difference, nan=np.inf)
