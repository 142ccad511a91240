import functools

import keras
import numpy as np
import pytest
from keras import layers

from keras_tp.distribution import reference_run


def build():
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2, name="d")])
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize(
    ("build_fn", "message"),
    [
        (lambda: None, "defined at the top of a module"),
        (3, "must be a function without arguments"),
        (layers.Dense(2), "To verify an existing model, save it"),
    ],
    ids=["lambda", "number", "layer"],
)
def test_functions_that_a_child_cannot_call(build_fn, message):
    with pytest.raises(ValueError, match=message):
        reference_run.check_picklable(build_fn)


def test_functions_that_a_child_can_call():
    reference_run.check_picklable(build)
    reference_run.check_picklable(functools.partial(build))


def test_batches_start_again_at_the_end_of_the_data():
    data = {"x": np.arange(5)}
    batches = [reference_run._batch(data, k, 3)["x"].tolist() for k in range(3)]
    assert batches == [[0, 1, 2], [3, 4, 0], [1, 2, 3]]


def test_outputs_are_kept_and_calls_are_restored():
    model = build()
    layer = model.get_layer("d")
    own = vars(layer).get("call")
    x = np.ones((4, 3), "float32")
    with reference_run._outputs_kept(model) as outputs:
        expected = keras.ops.convert_to_numpy(model(x))
    assert vars(layer).get("call") is own
    paths = [path for path, _ in outputs]
    assert paths[0].endswith("d") and paths[-1] == model.name
    np.testing.assert_array_equal(outputs[0][1][0], expected)


def test_layers_inside_of_loops_are_not_watched():
    cell = layers.LSTMCell(2)
    model = keras.Sequential([keras.Input((5, 3)), layers.RNN(cell)])
    watched = reference_run._observed(model)
    assert cell not in watched and model.layers[0] in watched


def test_arrays_are_copies_that_numpy_knows():
    array = np.ones(3)
    assert not np.shares_memory(reference_run._array(array), array)
    half = keras.ops.ones(3, dtype="bfloat16")
    assert reference_run._array(half).dtype == "float32"


def test_a_result_survives_a_message():
    weight = reference_run.Weight("d/kernel", "d", True)
    run = reference_run.Run([weight], [], [], [1.0], [[], [], []])
    plain = ([tuple(weight)], *run[1:])
    assert reference_run.sent(plain) == run
    assert reference_run.sent(1) == 1
