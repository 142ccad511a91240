"""Goes on in the middle of an epoch, where a backup was made.

The data of the epoch is drawn once more from its start, with the random state
that Python, numpy and the framework had there. The batches that were trained on
before the backup are dropped.

Data with a state of its own says where it is: a `PyDataset` or a `DataLoader`
that has `state_dict()` and `load_state_dict(state)`. Its state is that of the
start of an epoch.
"""

import collections
import weakref

from keras import ops

from keras_tp.backend import hooks
from keras_tp.backend import random_state
from keras_tp.backend.processes import messages
from keras_tp.backend.processes import progress

_END = object()


class Position(
    collections.namedtuple("Position", ["done", "at_start", "data"])
):
    """A position in an epoch.

    Args:
        done: Int, number of batches that were trained on.
        at_start: String, random state beside models when the epoch began.
        data: String, state of the data when the epoch began, or `None`.
    """


class _Resumed(
    collections.namedtuple("_Resumed", ["run", "position", "now", "metrics"])
):
    """An epoch that goes on.

    Args:
        run: Tuple of `progress.methods`: the call of `fit` that goes on.
        position: `Position`.
        now: String, random state beside models after the batches.
        metrics: List of the variables of metrics, with their values.
    """


class _Epochs:
    """The epochs of `fit`.

    Attributes:
        run: Tuple of `progress.methods`: the call of `fit` that makes backups.
        iterator: Weak reference to the `EpochIterator` of the `fit` that began
            an epoch last.
        start: `Position` at the start of that epoch.
        resumed: `_Resumed` of the epoch that begins next, or `None`.
    """

    def __init__(self):
        self.run = self.iterator = self.start = self.resumed = None


_epochs = _Epochs()


def follow():
    """Notes from now on where the epochs of the `fit` under way begin."""
    _epochs.run = progress.methods()


def position(done):
    """Returns the `Position` after some batches of the epoch under way.

    Args:
        done: Int, number of batches. At 0 the epoch begins next.
    """
    if done:
        return _epochs.start._replace(done=done)
    return _start_of(_epochs.iterator())


def go_on(model, position):
    """Makes the next epoch of the `fit` under way begin at a position.

    Call it after the model and the random state were loaded.

    Args:
        model: `keras.Model` that is in `fit`.
        position: `Position`.
    """
    # `fit` resets metrics when an epoch begins.
    metrics = [(v, ops.convert_to_numpy(v)) for v in model.metrics_variables]
    now = random_state.noted_beside_models()
    _epochs.resumed = _Resumed(progress.methods(), position, now, metrics)


@hooks.around
def begin_epoch(original, self):
    """Wraps `EpochIterator._enumerate_iterator`, which makes the steps."""
    run = progress.methods()
    if _epochs.run is not run or run[-1:] != ("fit",):
        yield from original(self)
        return
    resumed, _epochs.resumed = _epochs.resumed, None
    _epochs.iterator = weakref.ref(self)
    if resumed is None or resumed.run is not run:
        _epochs.start = _start_of(self)
        yield from original(self)
        return
    yield from _after(resumed, self, original(self))


def _after(resumed, iterator, steps):
    """Yields the steps of an epoch that are not done yet."""
    done, at_start, data = resumed.position
    if data is not None:
        _load_state(_source_of(iterator), data)
    if not done:
        _epochs.start = _start_of(iterator)
        yield from steps
        return
    _epochs.start = resumed.position
    random_state.restore_beside_models(at_start)
    step = next(steps, None)
    while step is not None and step[1] < done:
        for _ in range(iterator.steps_per_execution):
            if next(step[2], _END) is _END:
                raise _too_few(done)
        step = next(steps, None)
    if step is None:
        raise _too_few(done)
    # Data may have been drawn ahead of the step when the state was noted.
    # What was drawn by now has left Python's and numpy's generators right.
    random_state.restore_beside_models(resumed.now, python=False)
    for variable, value in resumed.metrics:
        variable.assign(value)
    yield step
    yield from steps


def _start_of(iterator):
    source, data = _source_of(iterator), None
    if _has_state(source):
        data = _encoded(source.state_dict())
    return Position(0, random_state.noted_beside_models(), data)


def _source_of(iterator):
    """Returns the `PyDataset` or the `DataLoader` that `fit` was given."""
    adapter = iterator.data_adapter
    loader = getattr(adapter, "_dataloader", None)
    return getattr(adapter, "py_dataset", loader)


def _has_state(source):
    return hasattr(source, "state_dict") and hasattr(source, "load_state_dict")


def _encoded(state):
    try:
        return messages.encode(state).decode()
    except TypeError as e:
        raise TypeError(
            "`state_dict` of the data must return numbers, strings, bytes, "
            "arrays, or lists, tuples and dicts of these: a backup holds it as "
            f"JSON. {e}"
        ) from e


def _load_state(source, data):
    if not _has_state(source):
        raise ValueError(
            "The backup holds the state of the data. Give `fit` data that has "
            "`load_state_dict`, as in the interrupted run. Received: "
            f"x={source}"
        )
    source.load_state_dict(messages.decode(data.encode()))


def _too_few(done):
    return ValueError(
        f"The backup was made after {done} batches of an epoch, and the data "
        "has no more than that. Give `fit` the data and the batch size of the "
        "interrupted run."
    )
