"""Where the parts of variables are, and how many bytes each device has."""

import keras
import numpy as np
import pytest

from keras_tp import backend
from keras_tp import distribution
from keras_tp.testing import models

SHAPE = (8, 12)
VALUE = np.arange(96, dtype="float32").reshape(SHAPE)


def variable_with(axes):
    """Returns a variable of `VALUE` with a layout."""
    layout_map = distribution.LayoutMap(models.mesh())
    layout_map[".*"] = axes
    parallel = distribution.ModelParallel(layout_map=layout_map)
    with parallel.scope():
        variable = keras.Variable(VALUE, name="table")
    return variable, layout_map[".*"]


@pytest.mark.parametrize("axes", [("model", None), (None, "model")])
def test_each_device_has_its_part(axes):
    lib = backend.distribution_lib
    variable, _ = variable_with(axes)
    assert lib.variable_axes(variable) == axes
    count = len(distribution.list_devices())
    bytes_of = lib.variable_bytes_by_device(variable)
    assert list(bytes_of.values()) == [VALUE.nbytes // count] * count
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(variable), VALUE)


@pytest.mark.parametrize("axes", [("model", None), (None, "model")])
def test_parts_are_read_and_set(axes):
    lib = backend.distribution_lib
    variable, _ = variable_with(axes)

    def of(ranges):
        # A list of starts and ends for each dim.
        return tuple(slice(*bounds[0]) for bounds in ranges)

    parts = lib.variable_parts(variable)
    assert parts
    for ranges, _, read in parts:
        np.testing.assert_array_equal(read(), VALUE[of(ranges)])
    lib.assign_parts(variable, lambda ranges: 2 * VALUE[of(ranges)])
    assert lib.variable_axes(variable) == axes
    found = keras.ops.convert_to_numpy(variable)
    np.testing.assert_array_equal(found, 2 * VALUE)


def test_a_variable_moves_and_keeps_its_value():
    lib = backend.distribution_lib
    variable, _ = variable_with(("model", None))
    _, columns = variable_with((None, "model"))
    for layout, axes in ((columns, (None, "model")), (None, None)):
        lib.relayout_variable(variable, layout)
        assert lib.variable_axes(variable) == axes
        found = keras.ops.convert_to_numpy(variable)
        np.testing.assert_array_equal(found, VALUE)
