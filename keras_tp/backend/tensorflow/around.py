"""The form of a hook that calls what it replaces."""

import functools


def around(function):
    """Makes a hook of a function whose first argument is the original."""

    def hook(original):
        @functools.wraps(original)
        def replacement(*args, **kwargs):
            return function(original, *args, **kwargs)

        return replacement

    return hook
