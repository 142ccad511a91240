"""Callbacks of a batch, which run while the devices run the next step.

They are given the loss. Keras on TensorFlow reads it in the loop, and so lets
the devices wait until the next batch is drawn and placed. On JAX it does that
in a thread. Here it waits for the start of the next step, because reading a
DTensor in a thread would also wait for that step.
"""

from keras.src import tree
from keras.src import utils
from keras.src.distribution.distribution_lib import distribution

from keras_tp.backend.tensorflow import placement


class _NextStep:
    """Has the interface of an executor; a function runs at the next `submit`.

    Keras asks for the results of its futures before it submits the next one,
    and at the end of an epoch.
    """

    def submit(self, function, *args):
        return _Later(function, args)

    def shutdown(self):
        """Does nothing: there are no threads."""


class _Later:
    """Has the interface of a future; `result` calls the function.

    The step that its arguments come from has been waited for by then.
    """

    def __init__(self, function, args):
        self._function = function
        self._args = args

    def done(self):
        return True

    def result(self):
        self._function(*tree.map_structure(_value, self._args))


def _value(x):
    return placement.read_parts(x) if placement.is_dtensor(x) else x


class LateCallbacks:
    """Methods of `CallbackList`."""

    def _configure_async_dispatch(original, self, callbacks):
        """Decides which callbacks may run late, by the rule of Keras on JAX.

        Callbacks of the user's own that run after batches run at once, unless
        they have an attribute `async_safe`.
        """
        original(self, callbacks)
        if distribution() is None:
            return
        own = tree.flatten(callbacks) if callbacks else []
        own = [x for x in own if not getattr(x, "async_safe", False)]

        def may_run_late(*names):
            return all(
                utils.is_default(getattr(callback, name))
                for callback in own
                for name in names
            )

        self._async_train = may_run_late("on_batch_end", "on_train_batch_end")
        self._async_test = may_run_late("on_test_batch_end")

    def _on_begin(original, self):
        """Runs late callbacks of training before validation begins."""
        self._flush_futures()
        if self._executor is None and (self._async_train or self._async_test):
            self._executor = _NextStep()
        original(self)
