"""A module that Keras would import to ask whether an object is of its types."""

import sys


class _IfImported:
    """A `LazyModule` of Keras that is there if something else imported it.

    Before that, no object is of its types.
    """

    def __init__(self, original):
        self._original = original

    @property
    def available(self):
        is_imported = self._original.name in sys.modules
        return is_imported and self._original.available

    def __getattr__(self, name):
        return getattr(self._original, name)


def if_imported(original):
    """Replaces a `LazyModule` of Keras in a module that serializes objects."""
    return _IfImported(original)
