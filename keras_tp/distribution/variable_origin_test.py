import gc

import keras
import pytest
from keras import layers

from keras_tp import distribution as dist
from keras_tp.distribution import variable_origin
from keras_tp.distribution.variable_origin import origin_of


@pytest.fixture
def one_device():
    device = dist.list_devices()[0]
    return dist.DataParallel(devices=[device])


def test_roles_models_and_distributions(one_device):
    with one_device.scope():
        model = keras.Sequential(
            [keras.Input((3,)), layers.Dense(2, name="d"), layers.Dropout(0.5)],
            name="net",
        )
        optimizer = keras.optimizers.SGD(momentum=0.9)
        optimizer.build(model.trainable_variables)
        metric = keras.metrics.Mean()
        alone = layers.Dense(2)
        alone.build((None, 3))
    kernel = origin_of(model.get_layer("d").kernel)
    assert kernel == ("weight", "net", one_device, None)
    assert origin_of(alone.kernel).root is None
    (seed,) = model.non_trainable_variables or [
        model.layers[-1].seed_generator.state
    ]
    assert origin_of(seed).role == "seed"
    assert {origin_of(v).role for v in optimizer.variables} == {"slot"}
    assert {origin_of(v).role for v in metric.variables} == {"metric"}


def test_variables_made_without_the_hooks_are_plain_weights():
    layer = layers.Dense(2)
    layer.build((None, 3))
    assert origin_of(layer.kernel) == ("weight", None, None, None)
    assert variable_origin.made_under(layer) is None


def test_a_layer_is_built_under_the_distribution_it_was_made_under(one_device):
    with one_device.scope():
        layer = layers.Dense(2)
    layer.build((None, 3))
    assert origin_of(layer.kernel).distribution is one_device
    assert dist.distribution() is None


def test_a_new_distribution_is_noted_for_all_parts(one_device):
    inner = layers.Dense(2)
    model = keras.Sequential([inner])
    variable_origin.note_made_under(model, one_device)
    assert variable_origin.made_under(inner) is one_device


def test_live_models_are_in_the_order_in_which_they_were_made(one_device):
    with one_device.scope():
        made = [keras.Sequential(name=f"m{index}") for index in range(12)]
    names = [model.name for model in variable_origin.live_models()]
    assert names[-12:] == [model.name for model in made]
    del made
    gc.collect()
    assert "m0" not in [m.name for m in variable_origin.live_models()]


def test_a_scope_restores_what_was_set(one_device):
    with one_device.scope():
        with pytest.raises(KeyError), variable_origin.scope_of(None):
            assert dist.distribution() is None
            raise KeyError
        assert dist.distribution() is one_device
