"""Hooks: attributes of Keras that are replaced while installed."""

import collections
import functools
import importlib
import inspect
import sys

import keras

from keras_tp.backend import current

# The hook tables name attributes of these Keras versions.
MINIMUM_KERAS = (3, 15)
NEXT_KERAS = (3, 16)
# Keras's backend -> the first version of its package that is tested.
MINIMUM_VERSIONS = {
    "jax": (0, 7),
    "tensorflow": (2, 20),
    "torch": (2, 13),
    "torch_xla": (2, 9),
}

_ABSENT = object()
_installed = []
_waiting = []
# Not empty once a table was installed.
_history = []


class Hook(
    collections.namedtuple(
        "Hook",
        ["owner", "attribute", "replace", "why", "adds", "waits"],
        defaults=[False, False],
    )
):
    """One row of a hook table.

    Args:
        owner: String, the module or object that has the attribute:
            `"module"`, `"module:Class"` or `"module:name.name"`.
        attribute: String, name of the attribute, or a tuple of names.
        replace: Callable that takes an original attribute and returns its
            replacement.
        why: String that ends the sentence "hooked so that ...".
        adds: Boolean. Whether the attribute may be absent, for example if
            Keras's module for one backend lacks a function that others have.
            `replace` then receives `None`. Defaults to `False`.
        waits: Boolean. Whether the hook waits until the module is imported,
            because its package is optional, such as KerasHub. Defaults to
            `False`.
    """

    @property
    def attributes(self):
        """Tuple of the names of the attributes."""
        if isinstance(self.attribute, tuple):
            return self.attribute
        return (self.attribute,)

    def is_due(self):
        """Returns whether the attributes can be replaced now."""
        return not self.waits or self.owner.partition(":")[0] in sys.modules

    def resolve(self):
        """Returns the live object that owns the attributes."""
        module, _, name = self.owner.partition(":")
        try:
            owner = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if not f"{module}.".startswith(f"{error.name}."):
                # Something that the module needs is not installed.
                raise
            owner = _ABSENT
        for part in name.split(".") if name else ():
            owner = getattr(owner, part, _ABSENT)
        for attribute in self.attributes:
            if owner is _ABSENT or not (self.adds or hasattr(owner, attribute)):
                raise RuntimeError(self._moved(module, attribute))
        return owner

    def _moved(self, module, attribute):
        """Returns the message about an attribute that is not there."""
        package = module.partition(".")[0]
        received = [f"keras {keras.__version__}"]
        if package != "keras":
            version = getattr(sys.modules.get(package), "__version__", "")
            received.append(f"{package} {version}".strip())
        name = "Keras" if package == "keras" else package
        return (
            f"{name} has no {self.owner}.{attribute}, which keras_tp replaces "
            f"so that {self.why}. Install a version of keras_tp that supports "
            f"this version of {name}. Received: {', '.join(received)}"
        )


def around(function):
    """Makes a hook's `replace` of a function that calls the original.

    Example:

    ```python
    @around
    def compile(original, self, /, *args, **kwargs):
        return original(self, *args, **kwargs)
    ```

    Args:
        function: Callable. Its first argument is the original attribute.
    """

    def replace(original):
        @functools.wraps(original)
        def replacement(*args, **kwargs):
            return function(original, *args, **kwargs)

        return replacement

    return replace


def methods_row(owner, methods, why):
    """Returns the row that replaces the methods of a class, or functions.

    Args:
        owner: String, as in `Hook`.
        methods: Class. Each of its functions replaces the one of that name,
            as in `around`.
        why: String, as in `Hook`.
    """
    functions = {
        name: function
        for name, function in vars(methods).items()
        if inspect.isfunction(function)
    }
    return Hook(
        owner,
        tuple(functions),
        lambda original: around(functions[original.__name__])(original),
        why,
    )


def backend_row(module):
    """Returns the row that makes a module the backend of `keras.distribution`.

    Args:
        module: The `distribution_lib` of one of keras_tp's backends. Keras
            itself has `None` on torch, and a prototype on TensorFlow.
    """
    return Hook(
        "keras.src.distribution.distribution_lib",
        "distribution_lib",
        lambda original: module,
        "plain `keras.distribution` has a backend",
    )


def check_versions():
    """Raises `ImportError` if Keras or its backend's package does not fit."""
    version = _version_of(keras)
    if not MINIMUM_KERAS <= version < NEXT_KERAS:
        raise ImportError(
            "keras_tp needs keras>=3.15,<3.16, because it replaces private "
            "attributes of that version. Run `pip install "
            f"'keras>=3.15,<3.16'`. Received: keras {keras.__version__}"
        )
    name = current.name()
    package = sys.modules.get(name)
    minimum = MINIMUM_VERSIONS.get(name)
    if package and minimum and _version_of(package) < minimum:
        wanted = f"{name}>={minimum[0]}.{minimum[1]}"
        raise ImportError(
            f"keras_tp needs {wanted}. Run `pip install '{wanted}'`. Received: "
            f"{name} {package.__version__}"
        )


def _version_of(package):
    """Returns a tuple: the major and the minor version of a package."""
    return tuple(int(part) for part in package.__version__.split(".")[:2])


def install(table):
    """Replaces the attributes of a table; a second call does nothing.

    Args:
        table: List of `Hook`. If one cannot be resolved, nothing is replaced.
    """
    if _installed:
        return
    _history.append(len(table))
    check_versions()
    due = [(hook, hook.resolve()) for hook in table if hook.is_due()]
    _replace(due)
    _waiting.extend(hook for hook in table if not hook.is_due())


def install_imported():
    """Installs the waiting hooks whose modules are imported by now."""
    due = [hook for hook in _waiting if hook.is_due()]
    for hook in due:
        _replace([(hook, hook.resolve())])
        _waiting.remove(hook)


def _replace(hooks_and_owners):
    for hook, owner in hooks_and_owners:
        for attribute in hook.attributes:
            # The owner itself lacks an inherited attribute: `uninstall` has to
            # delete it.
            own = vars(owner).get(attribute, _ABSENT)
            original = getattr(owner, attribute, None)
            # A property of an instance is restored by its setter.
            if inspect.isdatadescriptor(getattr(type(owner), attribute, None)):
                own = original
            setattr(owner, attribute, hook.replace(original))
            _installed.append((owner, attribute, own))


def uninstall():
    """Restores every replaced attribute, in reverse order."""
    _waiting.clear()
    while _installed:
        owner, attribute, own = _installed.pop()
        if own is _ABSENT:
            delattr(owner, attribute)
        else:
            setattr(owner, attribute, own)


def is_installed():
    """Returns whether the hooks are in place."""
    return bool(_installed)


def was_installed():
    """Returns whether the hooks are in place, or have been."""
    return bool(_history)
