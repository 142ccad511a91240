"""Runs a function that reads or writes files in every process."""

from keras_tp.backend import current
from keras_tp.backend.saving import digests


def run(function, what):
    """Runs a function in every process; an error in one is an error in all.

    A collective.

    Args:
        function: Function without arguments. It returns a small value.
        what: String, what the function does, as in `"write a file"`.

    Returns:
        List of what the functions returned.
    """
    processes = current.load("processes")
    result, error = None, None
    try:
        result = function()
    except digests.READING_ERRORS as e:
        error = e
    message = error and f"{type(error).__name__}: {error}"
    answers = processes.gather([message, result], f"To {what}")
    if error is not None:
        raise error
    for index, (message, _) in enumerate(answers):
        if message:
            raise OSError(f"Process {index} could not {what}: {message}")
    return [result for _, result in answers]
