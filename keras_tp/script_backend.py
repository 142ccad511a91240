"""The backend that a script chooses in its own text."""

import ast
import collections

VARIABLE = "KERAS_BACKEND"


class Choice(collections.namedtuple("Choice", ["backend", "replaces"])):
    """What a script sets `KERAS_BACKEND` to, before it imports Keras.

    Args:
        backend: String, or `None` if the script leaves the variable alone,
            computes its value, or sets it under a condition.
        replaces: Boolean. Whether it replaces the value of the environment.
    """


_NONE = Choice(None, False)


def chosen_by(path):
    """Returns the `Choice` of the script at a path."""
    try:
        with open(path, "rb") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError):
        # Running the script says what is wrong.
        return _NONE
    for node in tree.body:
        found = _assigned(node) or _default(node) or _if_missing(node)
        if found is not None:
            return found
    return _NONE


def _assigned(node):
    """Reads `os.environ["KERAS_BACKEND"] = "torch"`."""
    if (
        isinstance(node, ast.Assign)
        and any(
            isinstance(target, ast.Subscript)
            and _is_environ(target.value)
            and _text(target.slice) == VARIABLE
            for target in node.targets
        )
        and _text(node.value)
    ):
        return Choice(node.value.value, True)
    return None


def _default(node):
    """Reads `os.environ.setdefault("KERAS_BACKEND", "torch")`."""
    call = node.value if isinstance(node, ast.Expr) else None
    if (
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr == "setdefault"
        and _is_environ(call.func.value)
        and len(call.args) == 2
        and _text(call.args[0]) == VARIABLE
        and _text(call.args[1])
    ):
        return Choice(call.args[1].value, False)
    return None


def _if_missing(node):
    """Reads an assignment under `if "KERAS_BACKEND" not in os.environ:`."""
    if (
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Compare)
        and isinstance(node.test.ops[0], ast.NotIn)
        and _text(node.test.left) == VARIABLE
        and _is_environ(node.test.comparators[0])
    ):
        found = _assigned(node.body[0])
        return found and found._replace(replaces=False)
    return None


def _is_environ(node):
    name = node.attr if isinstance(node, ast.Attribute) else None
    return (name or getattr(node, "id", None)) == "environ"


def _text(node):
    value = node.value if isinstance(node, ast.Constant) else None
    return value if isinstance(value, str) else None
