"""Forms of models, and all that a user does with them after the scope."""

import keras
import numpy as np
import pytest
from keras.src.random import seed_generator

from keras_tp import distribution
from keras_tp.testing import models

CASE = models.CASES["pair"]
X, Y = CASE.x, CASE.y
STEPS = 2


class Subclassed(keras.Model):
    """A model whose first call builds it."""

    def __init__(self):
        super().__init__()
        self.up = keras.layers.Dense(64, activation="tanh", name="up_0")
        self.down = keras.layers.Dense(models.WIDTH, name="down_0")

    def call(self, x):
        return self.down(self.up(x))


def sequential():
    """A model whose first data builds it."""
    return keras.Sequential(
        [
            keras.layers.Dense(64, activation="tanh", name="up_0"),
            keras.layers.Dense(models.WIDTH, name="down_0"),
        ]
    )


FORMS = {
    "functional": lambda: models.pairs(64),
    "sequential": sequential,
    "subclassed": Subclassed,
}


def by_fit(model):
    return model.fit(X, Y, 2, STEPS, verbose=0, shuffle=False).history["loss"]


def by_evaluate(model):
    return [model.evaluate(X, Y, verbose=0), model.test_on_batch(X, Y)]


def by_predict(model):
    return [model.predict(X, verbose=0), model.predict_on_batch(X)]


def by_call(model):
    return [keras.ops.convert_to_numpy(model(X))]


def by_batch(model):
    return [model.train_on_batch(X, Y) for _ in range(STEPS)]


def _mean_squares(outputs, y):
    return keras.ops.mean(keras.ops.square(outputs - y))


def _need_variables(model, x):
    """A loop without state of its own has to have the variables first."""
    if not all(part.built for part in model._flatten_layers()):
        model(x)


def _on_jax(model, x, y, steps):
    import jax

    _need_variables(model, x)
    optimizer = model.optimizer
    optimizer.build(model.trainable_variables)

    def loss_and_updates(trainable, other):
        outputs, other = model.stateless_call(trainable, other, x)
        return _mean_squares(outputs, y), other

    @jax.jit
    def step(trainable, other, state):
        (loss, other), gradients = jax.value_and_grad(
            loss_and_updates, has_aux=True
        )(trainable, other)
        trainable, state = optimizer.stateless_apply(
            state, gradients, trainable
        )
        return loss, trainable, other, state

    state = [
        [variable.value for variable in variables]
        for variables in (
            model.trainable_variables,
            model.non_trainable_variables,
            optimizer.variables,
        )
    ]
    losses = []
    for _ in range(steps):
        loss, *state = step(*state)
        losses.append(float(loss))
    return losses


def _on_tensorflow(model, x, y, steps):
    import tensorflow as tf

    losses = []
    for _ in range(steps):
        with tf.GradientTape() as tape:
            loss = _mean_squares(model(x, training=True), y)
        variables = model.trainable_variables
        gradients = tape.gradient(loss, [v.value for v in variables])
        model.optimizer.apply(gradients, variables)
        losses.append(float(loss))
    return losses


def _on_torch(model, x, y, steps):
    import torch

    y = keras.ops.convert_to_tensor(y)
    losses = []
    for _ in range(steps):
        loss = _mean_squares(model(x, training=True), y)
        model.zero_grad()
        loss.backward()
        variables = model.trainable_variables
        with torch.no_grad():
            model.optimizer.apply([v.value.grad for v in variables], variables)
        losses.append(float(keras.ops.convert_to_numpy(loss)))
    return losses


_LOOPS = {"jax": _on_jax, "tensorflow": _on_tensorflow, "torch": _on_torch}


def loop(model, x, y, steps):
    """Trains a compiled model in a loop; returns the losses.

    Args:
        model: A Keras model that was compiled with an optimizer.
        x: Array, the batch of each step.
        y: Array, targets.
        steps: Int.
    """
    return _LOOPS[keras.config.backend()](model, x, y, steps)


def by_loop(model):
    return loop(model, X, Y, STEPS)


USES = {
    "fit": by_fit,
    "evaluate": by_evaluate,
    "predict": by_predict,
    "call": by_call,
    "train_on_batch": by_batch,
    "loop": by_loop,
}


def made(form):
    keras.utils.set_random_seed(1)
    model = FORMS[form]()
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def planned():
    return distribution.TensorParallel(models.mesh(), "batch")


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("form", FORMS)
def test_a_model_is_used_after_the_scope(form, use):
    expected = USES[use](made(form))
    with planned().scope():
        model = made(form)
    found = USES[use](model)
    models.assert_close(found, expected)
    assert len(models.split(model)) == 3


class Noting(keras.layers.Dense):
    """Notes the distribution under which it is saved."""

    seen = ()

    def save_own_variables(self, store):
        self.seen.append(distribution.distribution())
        super().save_own_variables(store)


ENTRIES = {
    "fit": lambda model, path: model.fit(X, Y, verbose=0),
    "evaluate": lambda model, path: model.evaluate(X, Y, verbose=0),
    "predict": lambda model, path: model.predict(X, verbose=0),
    "train_on_batch": lambda model, path: model.train_on_batch(X, Y),
    "test_on_batch": lambda model, path: model.test_on_batch(X, Y),
    "predict_on_batch": lambda model, path: model.predict_on_batch(X),
    "save": lambda model, path: model.save(path / "model.keras"),
    "save_weights": lambda model, path: model.save_weights(
        path / "model.weights.h5"
    ),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_the_distribution_of_the_model_is_entered(entry, tmp_path, monkeypatch):
    parallel, seen = planned(), []
    monkeypatch.setattr(Noting, "seen", seen)
    # `fit` draws the order of the samples.
    keras.utils.set_random_seed(1)
    with parallel.scope():
        inputs = keras.Input((models.WIDTH,))
        x = keras.layers.Dense(64, name="up_0")(inputs)
        x = Noting(models.WIDTH, name="down_0")(x)
        model = keras.Model(inputs, x)
        model.compile("sgd", "mse")
        model.train_on_batch(X, Y)

    def noting(step):
        def noted(*args, **kwargs):
            seen.append(distribution.distribution())
            return step(*args, **kwargs)

        return noted

    for name in ("train", "test", "predict"):
        step = getattr(model, f"{name}_step")
        setattr(model, f"{name}_step", noting(step))
        setattr(model, f"{name}_function", None)
    with distribution.DataParallel(models.axis("batch")).scope():
        ENTRIES[entry](model, tmp_path)
    assert seen
    assert all(current is parallel for current in seen)


class Doubled(keras.layers.Layer):
    """Passes its input on, with a gradient of its own."""

    def call(self, x):
        @keras.ops.custom_gradient
        def same(x):
            def gradient(*args, upstream=None):
                upstream = args[0] if upstream is None else upstream
                return 2 * upstream + keras.ops.ones(x.shape)

            return x, gradient

        return same(x)


@pytest.mark.parametrize("use", ["train_on_batch", "loop"])
def test_a_gradient_of_the_users_own(use):
    def build():
        keras.utils.set_random_seed(1)
        model = models.pairs(64)
        model = keras.Model(model.input, Doubled()(model.output))
        model.compile(keras.optimizers.SGD(0.01), "mse")
        return model

    expected = USES[use](build())
    with planned().scope():
        model = build()
    models.assert_close(USES[use](model), expected)
    assert models.split(model)


@pytest.mark.parametrize("use", ["fit", "loop"])
def test_a_model_that_was_moved_is_used(use):
    one = made("functional")
    moved = made("functional")
    distribution.distribute_model(moved, planned())
    for _ in range(2):
        models.assert_close(USES[use](moved), USES[use](one))
    assert models.split(moved)


def test_two_models_keep_their_own_distributions():
    expected = [by_batch(made(form)) for form in ("functional", "subclassed")]
    with planned().scope():
        first = made("functional")
    parallel = distribution.DataParallel(models.axis("batch"))
    with parallel.scope():
        second = made("subclassed")
        models.assert_close(by_batch(first), expected[0])
    models.assert_close(by_batch(second), expected[1])
    assert models.split(first) and not models.split(second)


def test_each_device_has_its_part_of_a_batch():
    with distribution.DataParallel(models.axis("batch")).scope():
        model = made("functional")
        sums = distribution.count_collectives(model, X, Y)["all_reduce"]
    # The gradient of each weight is a sum over the devices.
    held = sum(4 * int(np.prod(v.shape)) for v in model.trainable_variables)
    assert sums.bytes >= held


def test_a_pattern_that_matches_nothing_is_told():
    layout_map = distribution.LayoutMap(models.mesh())
    layout_map[".*up_0/kernel"] = models.COLUMN
    layout_map[".*upp_0/bias"] = ("model",)
    with distribution.ModelParallel(layout_map=layout_map).scope():
        with pytest.warns(UserWarning, match="upp_0/bias"):
            made("functional")


@pytest.mark.parametrize("kind", ["lora", "int8"])
def test_what_replaces_a_kernel_is_split_like_it(kind):
    with models.model_parallel(CASE).scope():
        model = models.made(CASE)
        whole = model.predict(X, verbose=0)
        if kind == "lora":
            for layer in model.layers[1:]:
                layer.enable_lora(4)
        else:
            model.quantize("int8")
        found = model.predict(X, verbose=0)
    name = "kernel" if kind == "int8" else "lora_kernel_b"
    split = [
        row.path
        for row in distribution.describe(model).rows
        if row.path.endswith(f"up_0/{name}") and row.is_split
    ]
    assert split
    models.assert_close([found], [whole], 0.2 if kind == "int8" else 1e-5)


def test_numbers_drawn_under_a_distribution_and_after_it():
    def drawn():
        return keras.ops.convert_to_numpy(keras.random.normal((3,)))

    keras.utils.set_random_seed(1)
    expected = [drawn() for _ in range(3)]
    keras.utils.set_random_seed(1)
    with planned().scope():
        found = [drawn()]
    found.append(drawn())
    # The state is not tied to the mesh of then.
    assert seed_generator.global_seed_generator().state._layout is None
    with distribution.DataParallel(models.axis("batch")).scope():
        found.append(drawn())
    models.assert_close(found, expected)
    assert len({tuple(numbers) for numbers in found}) == 3
