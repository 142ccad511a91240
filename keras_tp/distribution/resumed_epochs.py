"""Goes on in the middle of an epoch, where a backup was made.

The data of the epoch is drawn once more from its start, with the random state
that Python, numpy and the framework had there. The batches that were trained on
before the backup are dropped.
"""

import collections

from keras import ops

from keras_tp.backend import hooks
from keras_tp.backend import random_state
from keras_tp.backend.processes import progress

_END = object()


class _Resumed(
    collections.namedtuple(
        "_Resumed", ["run", "done", "at_start", "now", "metrics"]
    )
):
    """An epoch of which some batches are done.

    Args:
        run: Tuple of `progress.methods`: the call of `fit` that goes on.
        done: Int, number of batches.
        at_start: String, random state beside models when the epoch began.
        now: String, random state after the batches.
        metrics: List of the variables of metrics, with their values.
    """


class _Epochs:
    """The epochs of `fit`.

    Attributes:
        at_start: String, random state beside models at the start of the epoch
            that is under way, or `None` before the first.
        resumed: `_Resumed` of the epoch that begins next, or `None`.
    """

    def __init__(self):
        self.at_start = self.resumed = None


_epochs = _Epochs()


def state_at_start():
    """Returns the random state at the start of the epoch under way."""
    return _epochs.at_start


def go_on(model, done, at_start):
    """Makes the next epoch of the `fit` under way begin after some batches.

    Call it after the model and the random state were loaded.

    Args:
        model: `keras.Model` that is in `fit`.
        done: Int, number of batches that were trained on.
        at_start: String that `state_at_start` returned in that epoch.
    """
    # `fit` resets metrics when an epoch begins.
    metrics = [(v, ops.convert_to_numpy(v)) for v in model.metrics_variables]
    _epochs.resumed = _Resumed(
        progress.methods(),
        done,
        at_start,
        random_state.noted_beside_models(),
        metrics,
    )


@hooks.around
def begin_epoch(original, self):
    """Wraps `EpochIterator._enumerate_iterator`, which makes the steps."""
    run = progress.methods()
    if run[-1:] != ("fit",):
        yield from original(self)
        return
    resumed, _epochs.resumed = _epochs.resumed, None
    if resumed is None or resumed.run is not run:
        _epochs.at_start = random_state.noted_beside_models()
        yield from original(self)
        return
    _epochs.at_start = resumed.at_start
    random_state.restore_beside_models(resumed.at_start)
    steps = original(self)
    step = next(steps, None)
    while step is not None and step[1] < resumed.done:
        for _ in range(self.steps_per_execution):
            if next(step[2], _END) is _END:
                raise _too_few(resumed.done)
        step = next(steps, None)
    if step is None:
        raise _too_few(resumed.done)
    # Data may have been drawn ahead of the step when the state was noted.
    # What was drawn by now has left Python's and numpy's generators right.
    random_state.restore_beside_models(resumed.now, python=False)
    for variable, value in resumed.metrics:
        variable.assign(value)
    yield step
    yield from steps


def _too_few(done):
    return ValueError(
        f"The backup was made after {done} batches of an epoch, and the data "
        "has no more than that. Give `fit` the data and the batch size of the "
        "interrupted run."
    )
