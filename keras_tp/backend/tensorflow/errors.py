"""DTensor's errors, with the Keras layer they come from."""

import contextlib
import re

_UNSUPPORTED = re.compile(
    r"does not implement layout propagation|must have fully replicated"
    r"|Only replicated or batch|over sharded dimension|EmitAllScatter"
)


@contextlib.contextmanager
def explained(function=None):
    yield
