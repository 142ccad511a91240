"""Sparse inputs: what one device takes, a mesh takes, with its numbers."""

import keras
import numpy as np
import pytest
import scipy.sparse
from keras import layers

from integration_tests import harness
from keras_tp import distribution

ROWS, FEATURES, UNITS, OUTPUTS, BATCH = 10, 12, 8, 4, 4
# Rows that the batch axis divides, and a last batch of two.
TOLERANCE = 1e-5
KINDS = {"jax": ("scipy", "jax", "tensorflow"), "torch": ("scipy",)}.get(
    keras.config.backend(), ("scipy", "tensorflow")
)
# What plain Keras takes outside of a data pipeline.
OWN_KINDS = [kind for kind in KINDS if kind == keras.config.backend()]
DISTRIBUTIONS = ("data", "columns", "rows", "planned")


def dense():
    rng = np.random.default_rng(5)
    x = rng.standard_normal((ROWS, FEATURES), "float32")
    return np.where(rng.random(x.shape) < 0.3, x, 0).astype("float32")


def targets():
    rng = np.random.default_rng(6)
    return rng.standard_normal((ROWS, OUTPUTS), "float32")


def sparse(kind, x=None):
    x = dense() if x is None else x
    if kind == "scipy":
        return scipy.sparse.csr_matrix(x)
    if kind == "jax":
        from jax.experimental import sparse as jax_sparse

        return jax_sparse.BCOO.fromdense(x)
    import tensorflow as tf

    return tf.sparse.from_dense(x)


def make(name):
    if name == "data":
        mesh = harness.mesh(harness.fitted((2,)), ("batch",))
        return distribution.DataParallel(mesh)
    if name == "planned":
        return distribution.TensorParallel(harness.mesh(harness.fitted((2, 2))))
    kernels = {
        "columns": {"up/kernel": (None, "model"), "up/bias": ("model",)},
        "rows": {"up/kernel": ("model", None), "down/kernel": (None, "model")},
    }
    shape = harness.fitted((1, 2))
    return harness.model_parallel(kernels[name], shape)


def build(is_functional=True):
    keras.utils.set_random_seed(1)
    bias = keras.initializers.RandomUniform(-0.5, 0.5, seed=2)
    up = layers.Dense(
        UNITS, activation="relu", bias_initializer=bias, name="up"
    )
    down = layers.Dense(OUTPUTS, bias_initializer=bias, name="down")
    if is_functional:
        inputs = keras.Input((FEATURES,), sparse=bool(OWN_KINDS) or None)
        model = keras.Model(inputs, down(up(inputs)))
    else:
        model = keras.Sequential([up, down])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def compare(use, name, **kwargs):
    """Asserts that a use gives the same on one device and on a mesh."""
    expected = use(build(**kwargs))
    distribution.set_distribution(make(name))
    given = use(build(**kwargs))
    assert len(given) == len(expected)
    for one, other in zip(given, expected):
        assert harness.difference(one, other) <= TOLERANCE


def fit(model, x, y):
    history = model.fit(x, y, BATCH, epochs=2, shuffle=False, verbose=0)
    return [history.history["loss"], *model.get_weights()]


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_fit(name):
    x, y = sparse("scipy"), targets()
    compare(lambda m: fit(m, x, y), name)


@pytest.mark.parametrize("kind", KINDS)
def test_fit_of_a_model_that_is_not_built(kind):
    x, y = sparse(kind), targets()
    compare(lambda m: fit(m, x, y), "planned", is_functional=False)


@pytest.mark.parametrize(
    "kind, name",
    [("scipy", "data"), *((kind, "planned") for kind in KINDS)],
)
def test_evaluate_and_predict(kind, name):
    x, y = sparse(kind), targets()
    compare(
        lambda m: (
            m.evaluate(x, y, BATCH, verbose=0),
            m.predict(x, BATCH, verbose=0),
        ),
        name,
    )


@pytest.mark.skipif(
    keras.config.backend() == "torch", reason="plain Keras refuses it"
)
@pytest.mark.parametrize("kind", KINDS)
def test_generator(kind):
    y = targets()

    def batches():
        # Each has another number of entries.
        for start in range(0, ROWS, BATCH):
            part = slice(start, start + BATCH)
            yield sparse(kind, dense()[part]), y[part]

    def use(model):
        history = model.fit(batches(), verbose=0)
        return [history.history["loss"], *model.get_weights()]

    compare(use, "planned")


@pytest.mark.parametrize("name", ("data", "rows", "planned"))
@pytest.mark.parametrize("kind", OWN_KINDS)
def test_without_a_pipeline(kind, name):
    x, y = sparse(kind), targets()
    compare(
        lambda m: (
            keras.ops.convert_to_numpy(m(x)),
            m.predict_on_batch(x),
            m.test_on_batch(x, y),
            m.train_on_batch(x, y),
            *m.get_weights(),
        ),
        name,
    )


@pytest.mark.parametrize("use", ("__call__", "predict_on_batch"))
def test_what_one_device_refuses(use):
    x = sparse("scipy")
    with pytest.raises((TypeError, ValueError)) as expected:
        getattr(build(), use)(x)
    distribution.set_distribution(make("planned"))
    with pytest.raises(expected.type) as given:
        getattr(build(), use)(x)
    assert str(given.value)[:60] == str(expected.value)[:60]


@pytest.mark.parametrize("kind", OWN_KINDS)
def test_sparse_outputs_of_a_layer_without_variables(kind):
    x = sparse(kind)
    expected = layers.Add()([x, x])
    distribution.set_distribution(make("planned"))
    given = layers.Add()([x, x])
    assert type(given) is type(expected)
    assert (keras.ops.convert_to_numpy(given) == 2 * dense()).all()


@pytest.mark.parametrize("kind", OWN_KINDS)
def test_collectives_are_counted(kind):
    distribution.set_distribution(make("columns"))
    given, expected = (
        distribution.count_collectives(build(), x, targets())
        for x in (sparse(kind), dense())
    )
    assert given == expected
