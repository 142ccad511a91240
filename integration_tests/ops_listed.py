"""Functions of Keras that a backend computes whole, or refuses, and why.

Names are those of `ops_cases.public_functions`, of layers and of losses, with
the prefixes `layers.` and `losses.`.
"""

# A device holds more than its part of the result.
WHOLE = {"jax": {}, "tensorflow": {}, "torch": {}}

# An error names the operation.
REFUSED = {"jax": {}, "tensorflow": {}, "torch": {}}

# Keras refuses the inputs that the other backends take, on one device too.
NOT_THERE = {"jax": {}, "tensorflow": {}, "torch": {}}


def reason(table, backend, name):
    """Returns why a function stands in a table; `None` if it does not."""
    for why, names in table[backend].items():
        if name in names:
            return why
    return None
