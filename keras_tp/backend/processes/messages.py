"""Encodes the values that processes exchange as JSON, which cannot run code.

Anyone who can reach a port of a run can send bytes to it. A pickle could run
their code. These bytes decode to numbers, strings and arrays, or to an error.
"""

import base64
import json

import numpy as np


def encode(value):
    """Returns a value as bytes.

    Args:
        value: `None`, boolean, number, string, bytes, array, or a list, tuple
            or dict of these.

    Raises:
        TypeError: if the value is, or contains, anything else.
    """
    return json.dumps(_to_json(value)).encode()


def decode(data):
    """Returns the value that `encode` encoded."""
    try:
        return _from_json(json.loads(data))
    except (KeyError, RecursionError, TypeError, ValueError) as e:
        raise ValueError(
            "A message from another process cannot be decoded. Another "
            "program, or another version of keras_tp, may use the same ports. "
            f"Received: {bytes(data[:80])}"
        ) from e


def _to_json(value):
    if value is None or isinstance(value, (bool, int, float, str)):
        # `np.float64`, for example, is also a `float`.
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
        "Processes can exchange numbers, strings, bytes, arrays, and lists, "
        f"tuples and dicts of these. Received: {type(value).__name__}"
    )


def _array_to_json(value):
    if value.dtype.hasobject:
        raise TypeError("Processes cannot exchange arrays of objects.")
    # Types from other packages, such as bfloat16, are found by name only.
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
