"""Callbacks run at their place in the loop, the same in every process."""

import functools

from keras_tp.backend.hooks import Hook


def table(processes):
    """Returns the rows of a hook table, for a backend that has threads.

    On TensorFlow Keras runs callbacks in the loop anyway.

    Args:
        processes: The backend's module of that name, with `world_size`.
    """
    return [
        Hook(
            "keras.src.callbacks.callback_list:CallbackList",
            "_configure_async_dispatch",
            functools.partial(_dispatch_in_step, processes),
            "all processes convert to numpy in the same order",
        ),
    ]


def _dispatch_in_step(processes, original):
    """What a callback reads may be gathered from all processes.

    Keras runs callbacks of batches in threads beside the training loop. In
    each process they could then come before the next step or after it, and one
    would wait for what the others do not send.
    """

    @functools.wraps(original)
    def _configure_async_dispatch(self, callbacks):
        if processes.world_size() == 1:
            original(self, callbacks)

    return _configure_async_dispatch
