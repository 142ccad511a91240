import types

import jax
import numpy as np
import pytest

from keras_tp.backend.jax import arrays

SPREAD = types.SimpleNamespace(is_fully_addressable=False)


@pytest.mark.parametrize(
    "position", [(slice(0, 2), slice(None)), (slice(None), slice(2, 4))]
)
def test_a_part_does_not_keep_the_whole_value(position, monkeypatch):
    def make(shape, sharding, part):
        assert shape == (4, 4) and sharding is SPREAD
        return part(position)

    monkeypatch.setattr(jax, "make_array_from_callback", make)
    value = np.arange(16.0).reshape(4, 4)
    found = arrays.from_whole(value, SPREAD)
    np.testing.assert_array_equal(found, value[position])
    assert not np.shares_memory(found, value)
