"""Values that processes send to each other, as JSON: nothing in them runs.

Anyone who reaches a port of a run may send bytes to it. A pickle would be code
of theirs; these bytes become numbers, texts and arrays, or an error.
"""

import base64
import json

import numpy as np


def encode(value):
    """Returns a value as bytes.

    Args:
        value: `None`, boolean, number, string, bytes, array, or a list, tuple
            or dict of such.

    Raises:
        TypeError: if it is, or holds, anything else.
    """
    return json.dumps(_to_json(value)).encode()


def decode(data):
    """Returns the value that `encode` made bytes of.

    Raises:
        ValueError: if the bytes are anything else.
    """
    try:
        return _from_json(json.loads(data))
    except (KeyError, RecursionError, TypeError, ValueError) as e:
        raise ValueError(
            "A message is not one of keras_tp's. Do processes of another "
            "program, or of another version, use the same ports? Received: "
            f"{bytes(data[:80])}"
        ) from e


def _to_json(value):
    if value is None or isinstance(value, (bool, int, float, str)):
        # A number of numpy may be one of these too.
        return value.item() if isinstance(value, np.generic) else value
    if isinstance(value, list):
        return [_to_json(x) for x in value]
    if isinstance(value, tuple):
        return {"tuple": [_to_json(x) for x in value]}
    if isinstance(value, dict):
        pairs = [[_to_json(k), _to_json(x)] for k, x in value.items()]
        return {"dict": pairs}
    if isinstance(value, bytes):
        return {"bytes": _text(value)}
    if isinstance(value, (np.ndarray, np.generic)):
        return _array_to_json(value)
    raise TypeError(
        "Processes send each other numbers, texts, bytes, arrays, and lists, "
        f"tuples and dicts of them. Received: {type(value).__name__}"
    )


def _array_to_json(value):
    if value.dtype.hasobject:
        raise TypeError("Processes do not send each other arrays of objects.")
    # A type that numpy does not have itself, such as bfloat16, has a name only.
    of_others = value.dtype.kind == "V"
    return {
        "array": _text(value.tobytes()),
        "dtype": value.dtype.name if of_others else value.dtype.str,
        "shape": list(value.shape),
    }


def _from_json(found):
    if isinstance(found, list):
        return [_from_json(x) for x in found]
    if not isinstance(found, dict):
        return found
    if "tuple" in found:
        return tuple(_from_json(x) for x in found["tuple"])
    if "dict" in found:
        return {_from_json(k): _from_json(x) for k, x in found["dict"]}
    if "bytes" in found:
        return _data(found["bytes"])
    dtype = np.dtype(str(found["dtype"]))
    if dtype.hasobject:
        raise ValueError("An array of objects.")
    array = np.frombuffer(_data(found["array"]), dtype)
    return array.reshape(found["shape"]).copy()


def _text(data):
    return base64.b64encode(data).decode()


def _data(text):
    return base64.b64decode(text, validate=True)
