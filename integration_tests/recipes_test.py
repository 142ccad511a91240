"""Programs that know nothing of a mesh give the numbers of one device on it."""

import os

import keras
import numpy as np
import pytest
from keras import layers

from integration_tests import harness
from integration_tests import recipes
from integration_tests import recipes_examples
from integration_tests import recipes_sessions
from keras_tp import distribution as dist

RECIPES = {
    **recipes.RECIPES,
    **recipes_examples.RECIPES,
    **recipes_sessions.RECIPES,
}


def data_parallel():
    return dist.DataParallel(device_mesh=harness.mesh((2,), ["batch"]))


def tensor_parallel():
    return dist.TensorParallel(harness.mesh(harness.fitted((1, 2))))


def both():
    split = (dist.get_device_count() + 1) // 2
    return dist.TensorParallel(harness.mesh((2, min(split, 2))))


# torch runs with two devices, which `both` cannot split over two axes.
FAST = tensor_parallel if keras.config.backend() == "torch" else both
MESHES = [FAST]
if os.environ.get("KERAS_TP_SLOW") == "1":
    MESHES = [data_parallel, tensor_parallel, both]


# The longest ones there; CI runs each on the other backends.
SLOW = {
    "jax": (
        "conv_autoencoder",
        "data_augmentation",
        "knowledge_distillation",
        "residual_network",
        "several_inputs_and_outputs",
        "super_resolution",
        "text_classification",
        "variational_autoencoder",
        "video_frames",
    ),
    "tensorflow": (
        "copies",
        "copies_of_a_model_without_input",
        "gated_selection",
        "image_segmentation",
        "layers_added_and_removed",
        "masked_sequences",
        "miniature_gpt",
        "mlp_mixer",
        "mobile_network",
        "own_recurrent_cell",
        "parts_of_models",
        "sequence_classifier",
        "settings_between_two_fits",
        "siamese_network",
        "text_recognition",
        "transfer_learning",
        "translation",
        "vision_transformer",
    ),
    "torch": (),
}


def names():
    slow = SLOW[keras.config.backend()]
    assert set(slow) <= set(RECIPES)
    assert not set(SLOW["jax"]) & set(SLOW["tensorflow"])
    for name in RECIPES:
        marks = [pytest.mark.slow] if name in slow else []
        yield pytest.param(name, marks=marks)


@pytest.mark.parametrize("make", MESHES)
@pytest.mark.parametrize("name", names())
def test_a_program_gives_the_numbers_of_one_device(name, make):
    run = RECIPES[name]
    keras.utils.set_random_seed(5)
    expected = run()
    keras.utils.set_random_seed(5)
    with make().scope():
        found = run()
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
def test_layers_that_move_while_they_are_frozen(shape):
    """They train as before when they are trainable again."""

    def trained(distribution):
        keras.utils.set_random_seed(5)
        body = keras.Sequential(
            [layers.Dense(8, "tanh", name="up"), layers.Dense(4)], name="body"
        )
        model = keras.Sequential(
            [keras.Input((6,)), body, layers.Dense(2, name="head")]
        )
        body.trainable = False
        if distribution is not None:
            dist.distribute_model(model, distribution)
        body.trainable = True
        model.compile(keras.optimizers.SGD(0.1), "mse")
        x, y = recipes._numbers((8, 6)), recipes._numbers((8, 2), 1)
        model.fit(x, y, batch_size=8, epochs=2, verbose=0)
        return model.get_weights()

    layouts = {".*up/kernel": (None, "model")}
    expected = trained(None)
    found = trained(harness.model_parallel(layouts, shape))
    for a, b in zip(found, expected):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
