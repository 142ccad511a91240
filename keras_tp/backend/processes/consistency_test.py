import tracemalloc

import ml_dtypes
import numpy as np
import pytest

from keras_tp.backend.processes import consistency

ARRAYS = {
    "matrix": np.arange(12.0).reshape(3, 4),
    "transposed": np.arange(12.0).reshape(4, 3).T,
    "scalar": np.array(3),
    "empty": np.zeros((0, 2)),
    "bfloat16": np.ones(3, ml_dtypes.bfloat16),
}


@pytest.mark.parametrize("array", ARRAYS.values(), ids=ARRAYS)
def test_arrays_are_compared_by_shape_dtype_and_value(array):
    sent = []

    def gather(value):
        sent.append(value)
        return [value, sent[0]]

    consistency.same_array(gather, array)
    consistency.same_array(gather, array.copy())
    others = [array[None], array.astype("float16")]
    if array.size:
        others.append(array + 1)
    for other in others:
        with pytest.raises(ValueError, match="different values"):
            consistency.same_array(gather, other)


def test_no_copy_of_an_array_is_made():
    array = np.ones((256, 1024))
    tracemalloc.start()
    try:
        consistency.same_array(lambda value: [value], array)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < array.nbytes / 4
