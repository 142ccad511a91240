import json
import pickle
import random

import ml_dtypes
import numpy as np
import pytest

from keras_tp.backend.processes import messages


class Ran:
    """Notes that a pickle of it was loaded."""

    seen = []

    def __reduce__(self):
        return Ran.seen.append, (True,)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -3,
        2**70,
        0.1,
        float("inf"),
        "text ä \n",
        b"\x00\xff",
        [],
        (),
        {},
        [1, [2, (3, [None])]],
        {"a": 1, 2: "b", (3, "c"): {"d": b"e"}},
        random.Random(3).getstate(),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_is_sent_arrives(value):
    found = messages.decode(messages.encode(value))
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype="int8").reshape(2, 3),
        np.array(2.5, "float32"),
        np.array([1.5, -2], ml_dtypes.bfloat16),
        np.array(["a", "bcd"]),
        np.zeros((0, 3), bool),
        np.ones((2, 2), "complex64").T,
    ],
)
def test_arrays_arrive(array):
    found = messages.decode(messages.encode({"array": array}))["array"]
    assert found.dtype == array.dtype and found.shape == array.shape
    np.testing.assert_array_equal(found, array)
    # It can be written to, as the one that was sent.
    found[...] = array


def test_the_state_of_numpy_arrives():
    state = np.random.RandomState(4).get_state()
    other = np.random.RandomState()
    other.set_state(messages.decode(messages.encode(state)))
    assert other.rand() == np.random.RandomState(4).rand()


@pytest.mark.parametrize(
    "value", [object(), {1, 2}, [lambda: 0], np.array([None, {}])], ids=repr
)
def test_other_values_are_refused(value):
    with pytest.raises(TypeError, match="Processes"):
        messages.encode(value)


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(Ran()),
        b"",
        b"\xff\xfe",
        b"{",
        b"[" * 100_000,
        json.dumps({"tuple": 3}).encode(),
        json.dumps({"other": 3}).encode(),
        json.dumps({"bytes": "%%%"}).encode(),
        json.dumps({"dict": [[[], 1]]}).encode(),
        json.dumps({"array": "AAAA", "dtype": "O", "shape": [1]}).encode(),
        json.dumps({"array": "AAAA", "dtype": "i4", "shape": [9]}).encode(),
    ],
    ids=lambda data: str(data[:20]),
)
def test_bytes_of_strangers_are_an_error_and_run_nothing(data):
    with pytest.raises(ValueError, match="cannot be decoded. Another program"):
        messages.decode(data)
    assert not Ran.seen
