import keras
import pytest
from keras import layers

from keras_tp.distribution.planning import model_inputs


def specs(call):
    (args, kwargs) = call
    found = keras.tree.flatten((args, kwargs))
    return [(spec.shape, spec.dtype) for spec in found]


def test_shapes_and_keras_tensors_of_the_user():
    tokens = keras.KerasTensor((None, 7), "int32")
    given = {"tokens": tokens, "mask": (None, 7, 1)}
    call = model_inputs.call_spec_of(layers.Dense(2), given)
    expected = [((None, 7, 1), "float32"), ((None, 7), "int32")]
    assert specs(call) == expected


def test_inputs_that_a_model_knows():
    functional = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
    unbuilt = keras.Sequential([layers.Dense(2)])
    assert specs(model_inputs.call_spec_of(functional, None)) == [
        ((None, 3), "float32")
    ]
    assert model_inputs.are_known(functional)
    assert not model_inputs.are_known(unbuilt)
    with pytest.raises(model_inputs.NoPlanError, match="Pass `input_spec`"):
        model_inputs.call_spec_of(unbuilt, None)


class OfDict(keras.Model):
    """A model whose user calls `build` with the shapes of a dict."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(4)

    def build(self, shapes):
        self.dense.build(shapes["x"])

    def call(self, inputs):
        return self.dense(inputs["x"])


class OfKeywords(OfDict):
    def call(self, *args, **kwargs):
        return self.dense(*args, kwargs["x"])


class OfPositions(OfDict):
    def call(self, *args):
        return self.dense(args[0]["x"])


@pytest.mark.parametrize("cls", [OfDict, OfKeywords, OfPositions])
def test_a_model_that_was_built_with_a_dict_of_shapes(cls):
    model = cls()
    model.build({"x": (2, 6)})
    call = model_inputs.call_spec_of(model, None)
    assert specs(call) == [((2, 6), "float32")]
    args, kwargs = model_inputs.symbolic(call, 3, 5)
    # As attributes of Keras are, it would be no input for JAX.
    assert all(type(given) is dict for given in (*args, kwargs))
    assert model(*args, **kwargs).shape == (2, 4)


def test_a_models_own_input_spec_fixes_sizes():
    layer = layers.Dense(2)
    layer.build((None, 5))
    layer.input_spec = keras.InputSpec(shape=(None, 5))
    (args, _) = model_inputs.call_spec_of(layer, (None, None))
    model_inputs.narrow(args, layer)
    assert args[0].shape == (None, 5)


def test_placeholders_for_unknown_dims():
    shapes = [(None, None, 8), (None, None, None, 3), (2, None), ()]
    call = model_inputs.call_spec_of(layers.Dense(2), shapes)
    (made,), _ = model_inputs.symbolic(call, 3, 5)
    assert [x.shape for x in made] == [
        (3, 5, 8),
        (3, model_inputs.IMAGE_SIZE, model_inputs.IMAGE_SIZE, 3),
        (2, 5),
        (),
    ]


def test_standing_sizes_divide_no_dim():
    layer = layers.Dense(15)
    layer.build((None, 7))
    call = model_inputs.call_spec_of(layer, (None, 11, None))
    assert model_inputs.standing_sizes(layer, call) == (23, 13)
    # Nothing grows with a length.
    call = model_inputs.call_spec_of(layer, (None, 11))
    assert model_inputs.standing_sizes(layer, call) == (23, 1009)
