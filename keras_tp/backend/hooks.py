"""The table of everything in Keras that is replaced while installed."""

import collections
import importlib

import keras

# Keras's versions whose attributes the hook tables were written against.
MINIMUM_KERAS = (3, 15)
NEXT_KERAS = (3, 16)

_ABSENT = object()
_installed = []


class Hook(
    collections.namedtuple(
        "Hook",
        ["owner", "attribute", "replace", "why", "adds"],
        defaults=[False],
    )
):
    """One row of a hook table.

    Args:
        owner: String, `"module"`, `"module:Class"` or `"module:name.name"`,
            that holds the attribute.
        attribute: String, name of the attribute.
        replace: Callable that is given the original and returns what takes
            its place.
        why: String that ends the sentence "hooked so that ...".
        adds: Boolean. Whether the attribute may be absent, as where Keras's
            module for a backend lacks a function that others have; then
            `replace` is given `None`. Defaults to `False`.
    """

    def resolve(self):
        """Returns the live object that owns the attribute."""
        module, _, name = self.owner.partition(":")
        owner = importlib.import_module(module)
        for part in name.split(".") if name else ():
            owner = getattr(owner, part, _ABSENT)
        if owner is _ABSENT or not (
            self.adds or hasattr(owner, self.attribute)
        ):
            raise RuntimeError(
                f"Keras {keras.__version__} has no {self.owner}."
                f"{self.attribute}, which keras_tp hooks so that {self.why}. "
                "Keras moved it: keras_tp needs a release made for this "
                "version of Keras."
            )
        return owner


def check_keras_version():
    """Raises `ImportError` unless this Keras is one the hooks were made for."""
    version = tuple(int(part) for part in keras.__version__.split(".")[:2])
    if not MINIMUM_KERAS <= version < NEXT_KERAS:
        raise ImportError(
            "keras_tp needs keras>=3.15,<3.16, because its hooks name "
            "attributes of that version: pip install 'keras>=3.15,<3.16'. "
            f"Received: keras {keras.__version__}"
        )


def install(table):
    """Replaces the attributes of a table; a second call does nothing.

    Args:
        table: List of `Hook`. If one cannot be resolved, none stays replaced.
    """
    if _installed:
        return
    check_keras_version()
    for hook, owner in [(hook, hook.resolve()) for hook in table]:
        # An inherited attribute is absent from the owner itself, and has to
        # be absent again afterwards.
        own = vars(owner).get(hook.attribute, _ABSENT)
        original = getattr(owner, hook.attribute, None)
        setattr(owner, hook.attribute, hook.replace(original))
        _installed.append((owner, hook.attribute, own))


def uninstall():
    """Puts every replaced attribute back, the last one first."""
    while _installed:
        owner, attribute, own = _installed.pop()
        if own is _ABSENT:
            delattr(owner, attribute)
        else:
            setattr(owner, attribute, own)


def is_installed():
    """Returns whether the hooks are in place."""
    return bool(_installed)
