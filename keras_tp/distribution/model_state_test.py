"""When a model is planned, and which distribution it belongs to."""

import keras
import numpy as np
import pytest
from keras import layers

import keras_tp
from keras_tp import distribution as dist
from keras_tp.distribution import optimizer_slots


class TwoInputs(keras.Model):
    """Says nothing of its inputs, and one of them are ids."""

    def __init__(self):
        super().__init__()
        self.table = layers.Embedding(24, 8)
        self.up = layers.Dense(16, activation="gelu")
        self.down = layers.Dense(8)

    def call(self, x, ids, training=False):
        return self.down(self.up(x + self.table(ids)))


X = np.ones((4, 5, 8), "float32")
IDS = np.arange(20, dtype="int32").reshape(4, 5)


def parallel():
    return dist.TensorParallel(
        dist.DeviceMesh(
            (1, dist.get_device_count()),
            ["batch", "model"],
            dist.list_devices(),
        )
    )


def pair(name=None):
    return keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(16, activation="gelu", name="up"),
            layers.Dense(8, name="down"),
        ],
        name=name,
    )


def assert_planned(model, distribution):
    assert distribution.plan.model_name == model.name
    for variable in model.weights:
        axes = distribution.plan[variable.path].axes
        assert tuple(variable._layout.axes) == axes
        assert tuple(keras_tp.backend.distribution_lib.variable_axes(variable))


def test_a_model_of_several_inputs_is_planned_as_it_is_called():
    distribution = parallel()
    with distribution.scope():
        model = TwoInputs()
    outputs = model(X, ids=IDS)
    assert_planned(model, distribution)
    axes = distribution.plan[model.up.kernel.path].axes
    assert axes == (None, "model"), str(distribution.plan)
    assert keras.ops.shape(outputs) == (4, 5, 8)


def test_values_that_are_read_have_the_layouts_of_the_plan():
    distribution = parallel()
    with distribution.scope():
        model = pair()
    assert distribution.plan is None
    _ = [variable.value for variable in model.trainable_variables]
    assert_planned(model, distribution)


def _stateless_gradient(model, x):
    import jax

    def loss(trainable, others, x):
        outputs, _ = model.stateless_call(trainable, others, x)
        return keras.ops.sum(outputs**2)

    trainable = [v.value for v in model.trainable_variables]
    others = [v.value for v in model.non_trainable_variables]
    return jax.value_and_grad(loss)(trainable, others, x)


def _of_jax(transform):
    """Applies a transformation to a loss; the import is JAX's own."""

    def use(model, x):
        import jax

        return transform(jax, lambda x: keras.ops.sum(model(x) ** 2))(x)

    return use


FIRST_USES = {
    "grad": _of_jax(lambda jax, loss: jax.grad(loss)),
    "jit of grad": _of_jax(lambda jax, loss: jax.jit(jax.grad(loss))),
    "vmap": _of_jax(lambda jax, loss: jax.vmap(lambda row: loss(row[None]))),
    "stateless_call": _stateless_gradient,
}


@pytest.mark.skipif(
    keras.config.backend() != "jax", reason="transformations of JAX"
)
@pytest.mark.parametrize(
    "use, form",
    [
        *((use, form) for use in FIRST_USES for form in ("layers", "stack")),
        # In the others, Keras would make the variables in a trace.
        ("grad", "unbuilt"),
    ],
)
def test_a_transformation_of_jax_is_the_first_use(use, form):
    """After the scope, and as on one device."""

    def make():
        keras.utils.set_random_seed(1)
        if form == "stack":
            return pair()
        parts = [layers.Dense(16, activation="gelu"), layers.Dense(8)]
        if form == "unbuilt":
            return keras.Sequential(parts)
        inputs = keras.Input((8,))
        return keras.Model(inputs, parts[1](parts[0](inputs)))

    x = np.random.default_rng(0).normal(size=(4, 8)).astype("float32")
    expected = FIRST_USES[use](make(), x)
    distribution = parallel()
    with distribution.scope():
        model = make()
    found = FIRST_USES[use](model, x)
    for a, b in zip(keras.tree.flatten(found), keras.tree.flatten(expected)):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    # A trace moves nothing; the next call does.
    model(x)
    assert_planned(model, distribution)


def test_slots_of_an_optimizer_that_is_built_first():
    """A loop of one's own builds its optimizer before it calls the model."""
    distribution = parallel()
    with distribution.scope():
        # The provisional layout of a kernel splits its largest dim.
        model = keras.Sequential(
            [
                keras.Input((24,)),
                layers.Dense(16, activation="gelu", name="up"),
                layers.Dense(8, name="down"),
            ]
        )
        optimizer = keras.optimizers.Adam()
        optimizer.build(model.trainable_variables)
    assert_planned(model, distribution)
    kernel = model.get_layer("up").kernel
    assert distribution.plan[kernel.path].axes == (None, "model")
    axes = keras_tp.backend.distribution_lib.variable_axes
    slots = list(optimizer_slots.slots_of(optimizer))
    assert len(slots) == 8
    for slot, variable, _ in slots:
        assert axes(slot) == axes(variable), slot.path


def test_the_outermost_model_is_planned():
    distribution = parallel()
    with distribution.scope():
        inner = pair("inner")
        inputs = keras.Input((8,))
        outer = keras.Model(inputs, inner(inputs), name="outer")
    _ = inner.weights[0].value
    assert_planned(outer, distribution)


def test_a_part_that_is_used_before_its_model_exists_is_planned_again():
    distribution = parallel()
    with distribution.scope():
        inner = pair("inner")
        inner(np.ones((4, 8)))
        assert_planned(inner, distribution)
        inputs = keras.Input((8,))
        outer = keras.Model(
            inputs, layers.Dense(6)(inner(inputs)), name="outer"
        )
    outer(np.ones((4, 8)))
    assert_planned(outer, distribution)


def test_a_layer_is_built_under_the_distribution_it_was_made_under():
    distribution = dist.DataParallel()
    with distribution.scope():
        layer = layers.Dense(4)
    layer.build((None, 8))
    assert layer.kernel._layout.device_mesh is distribution.device_mesh
    plain = layers.Dense(4)
    plain.build((None, 8))
    assert plain.kernel._layout is None


def test_a_model_that_was_moved_builds_its_parts_where_it_is():
    distribution = parallel()
    with distribution.scope():
        model = TwoInputs()
        model(X, IDS)
    other = dist.DataParallel()
    dist.distribute_model(model, other)
    late = model.down
    assert keras_tp.distribution.variable_origin.made_under(late) is other


def test_planning_a_model_that_is_not_built_leaves_it_usable():
    model = keras.Sequential([layers.Dense(16), layers.Dense(8)])
    plan = dist.plan_sharding(
        model, dist.DeviceMesh((2,), ["model"], ["cpu:0", "cpu:1"]), (None, 8)
    )
    assert len(plan.variables) == 4
    assert np.isfinite(model.predict(np.ones((4, 8)), verbose=0)).all()


@pytest.mark.skipif(keras.config.backend() != "jax", reason="traces of JAX")
def test_nothing_is_moved_while_a_function_is_traced():
    import jax

    distribution = parallel()
    with distribution.scope():
        model = pair()
    x = np.random.default_rng(0).normal(size=(4, 8)).astype("float32")
    traced = jax.jit(lambda x: model(x))(x)
    assert distribution.plan is None
    np.testing.assert_allclose(traced, model(x), atol=1e-6)
    assert_planned(model, distribution)


@pytest.mark.skipif(keras.config.backend() != "torch", reason="torch's own")
def test_parameters_that_an_optimizer_is_given_are_those_that_train():
    import torch

    distribution = parallel()
    with distribution.scope():
        model = pair()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = keras.ops.convert_to_numpy(model.weights[0])
    keras.ops.mean(model(np.ones((4, 8), "float32")) ** 2).backward()
    optimizer.step()
    assert_planned(model, distribution)
    after = keras.ops.convert_to_numpy(model.weights[0])
    assert np.abs(after - before).max() > 1e-5


class ReadsInBuild(layers.Layer):
    """As KerasHub's DINOv2, which interpolates its positions."""

    def build(self, shape):
        self.positions = self.add_weight((shape[-1],), name="positions")
        self.scaled = self.add_weight((shape[-1],), name="scaled")
        self.scaled.assign(self.positions * 2.0)

    def call(self, x):
        return x + self.scaled


class SetsLayersFirst(keras.Model):
    def __init__(self):
        self.embeddings = ReadsInBuild()
        inputs = keras.Input((4,))
        x = layers.Dense(4)(self.embeddings(inputs))
        super().__init__(inputs, x)


@pytest.mark.skipif(
    keras.config.backend() == "torch",
    reason="torch takes no layers before its `Module.__init__`",
)
def test_a_weight_is_read_before_its_model_is_made():
    with parallel().scope():
        model = SetsLayersFirst()
        np.testing.assert_allclose(
            model.embeddings.scaled, 2 * np.array(model.embeddings.positions)
        )
        assert model.predict(np.ones((2, 4)), verbose=0).shape == (2, 4)
