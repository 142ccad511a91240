"""The backend that a script chooses in its own text."""

import ast

VARIABLE = "KERAS_BACKEND"


def chosen_by(path):
    """Returns what a script sets `KERAS_BACKEND` to, before it imports Keras.

    Args:
        path: Path of the script.

    Returns:
        Pair: the value, and whether it replaces that of the environment. It is
        `(None, False)` if the script leaves the variable alone, or computes it.
    """
    try:
        with open(path, "rb") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError):
        # Running the script says what is wrong.
        return None, False
    for node in ast.walk(tree):
        found = _assigned(node) or _default(node)
        if found is not None:
            return found
    return None, False


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
        return node.value.value, True
    return None


def _default(node):
    """Reads `os.environ.setdefault("KERAS_BACKEND", "torch")`."""
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "setdefault"
        and _is_environ(node.func.value)
        and len(node.args) == 2
        and _text(node.args[0]) == VARIABLE
        and _text(node.args[1])
    ):
        return node.args[1].value, False
    return None


def _is_environ(node):
    name = node.attr if isinstance(node, ast.Attribute) else None
    return (name or getattr(node, "id", None)) == "environ"


def _text(node):
    value = node.value if isinstance(node, ast.Constant) else None
    return value if isinstance(value, str) else None
