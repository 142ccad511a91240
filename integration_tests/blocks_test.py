"""Kernels of several blocks in one dim: fused projections, gated layers."""

import functools

import keras
import numpy as np
import pytest
from keras import layers
from keras import ops

from integration_tests import forms_test
from integration_tests import harness
from keras_tp import backend
from keras_tp import distribution

BACKEND = keras.config.backend()
LENGTH, WIDTH, HEADS = 6, 16, 4
SHAPES = harness.shapes((1, 4), (2, 2), slow=[(1, 2)])
SPLITS = backend.distribution_lib.splits_in_blocks()
only_split = pytest.mark.skipif(not SPLITS, reason="blocks stay whole")
FUSED = {"qkv": 3, "gate_up": 2}
# Where blocks stay whole, one form is like another.
FORMS = ["split", "indices", "reshape", "unstack"] if SPLITS else ["split"]


class Block(layers.Layer):
    """Attention and a gated layer.

    Args:
        form: String, how the projections are cut: `"split"`, `"indices"`,
            `"reshape"` or `"unstack"`, or `"apart"` for one layer for each.
    """

    def __init__(self, form, **kwargs):
        super().__init__(**kwargs)
        self.form = form
        self.norm = layers.LayerNormalization(epsilon=1e-5, name="norm")
        if form == "apart":
            self.q, self.k, self.v, self.gate, self.up = (
                layers.Dense(units, use_bias=units > WIDTH, name=name)
                for name, units in zip(
                    ("q", "k", "v", "gate", "up"),
                    (*[WIDTH] * 3, 2 * WIDTH, 2 * WIDTH),
                )
            )
        else:
            # The gradient of the keys' bias is zero: Adam would move it by what
            # rounding leaves.
            self.qkv = layers.Dense(3 * WIDTH, use_bias=False, name="qkv")
            self.gate_up = layers.Dense(4 * WIDTH, name="gate_up")
        self.out = layers.Dense(WIDTH, name="out")
        self.down = layers.Dense(WIDTH, name="down")

    def build(self, shape):
        for layer in self._layers:
            wide = (*shape[:-1], 2 * WIDTH)
            layer.build(wide if layer is self.down else shape)
        super().build(shape)

    def _projections(self, x):
        if self.form == "apart":
            return self.q(x), self.k(x), self.v(x)
        y = self.qkv(x)
        if self.form == "split":
            return ops.split(y, 3, -1)
        if self.form == "indices":
            return ops.split(y, [WIDTH, 2 * WIDTH], axis=2)
        y = ops.reshape(y, (-1, LENGTH, 3, HEADS, WIDTH // HEADS))
        if self.form == "unstack":
            y = ops.transpose(y, (2, 0, 3, 1, 4))
            return [ops.transpose(z, (0, 2, 1, 3)) for z in ops.unstack(y, 3)]
        return ops.unstack(y, 3, axis=2)

    def call(self, x):
        q, k, v = (
            ops.reshape(y, (-1, LENGTH, HEADS, WIDTH // HEADS))
            for y in self._projections(self.norm(x))
        )
        scores = ops.softmax(ops.einsum("bthd,bshd->bhts", q, k))
        y = ops.einsum("bhts,bshd->bthd", scores, v)
        x = x + self.out(ops.reshape(y, (-1, LENGTH, WIDTH)))
        if self.form == "apart":
            gate, up = self.gate(x), self.up(x)
        else:
            gate, up = ops.split(self.gate_up(x), 2, axis=-1)
        return x + self.down(ops.silu(gate) * up)


def network(form="split"):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((LENGTH, WIDTH))
    x = layers.Dense(WIDTH, name="first")(inputs)
    x = Block(form, name="block")(x)
    model = keras.Model(inputs, layers.Dense(3, name="last")(x), name="net")
    rng = np.random.default_rng(3)
    for variable in model.weights:
        if variable.path.endswith("bias"):
            variable.assign(rng.normal(0, 0.1, variable.shape))
    return model


def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, LENGTH, WIDTH)).astype("float32")
    return x, rng.normal(size=(8, LENGTH, 3)).astype("float32")


OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.003, weight_decay=0.01),
    "clipped": lambda: keras.optimizers.SGD(0.5, global_clipnorm=0.1),
    "averaged": lambda: keras.optimizers.RMSprop(0.001, clipnorm=0.1),
    "trust": lambda: keras.optimizers.Lamb(0.01),
    "factored": lambda: keras.optimizers.Adafactor(0.01),
    "orthogonal": lambda: keras.optimizers.Muon(0.01),
    "accumulated": lambda: keras.optimizers.SGD(
        0.1, momentum=0.9, gradient_accumulation_steps=2
    ),
}


def trained(model, optimizer):
    model.compile(OPTIMIZERS[optimizer](), "mse")
    x, y = data()
    history = model.fit(x, y, batch_size=4, epochs=3, shuffle=False, verbose=0)
    return history.history["loss"], harness.weights_of(model), model.predict(x)


@functools.cache
def reference(optimizer, form="split"):
    harness.assert_plain()
    return trained(network(form), optimizer)


def parallel(shape):
    return distribution.TensorParallel(harness.mesh(shape))


def assert_split(model, count):
    """Each device holds its part of the kernels, and of their slots."""
    rows = distribution.describe(model).rows
    found = {name: 0 for name in FUSED}
    for row in rows:
        for name in FUSED:
            if f"block/{name}/kernel" in row.path and len(row.shape) == 2:
                found[name] += 1
                held = set(row.device_bytes.values())
                whole = np.prod(row.shape) * 4
                assert held == {whole // count if SPLITS else whole}, row
                axes = (None, "model") if SPLITS else (None, None)
                assert row.axes == axes, row
    assert all(found.values())


def check_training(optimizer, form, shape, atol=2e-5):
    want_losses, want_weights, want_outputs = reference(optimizer, form)
    with parallel(shape).scope():
        model = network(form)
        losses, weights, outputs = trained(model, optimizer)
        assert_split(model, shape[1])
    np.testing.assert_allclose(losses, want_losses, rtol=1e-5)
    for path, value in want_weights.items():
        assert weights[path].shape == value.shape
        np.testing.assert_allclose(
            weights[path], value, atol=atol, err_msg=path
        )
    np.testing.assert_allclose(outputs, want_outputs, atol=2e-4)


@SHAPES
@pytest.mark.parametrize("form", FORMS)
def test_training_is_that_of_one_device(form, shape):
    check_training("adam", form, shape)


@only_split
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers(optimizer):
    # Rounding moves an update of Adafactor and Muon, which they normalize.
    atol = {"factored": 2e-3, "orthogonal": 5e-4}.get(optimizer, 2e-5)
    shape = harness.fitted((1, 4))
    check_training(optimizer, "split", shape, atol)


LOOP_OPTIMIZERS = OPTIMIZERS | {
    "plain": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "nesterov": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "moving_average": lambda: keras.optimizers.Adam(0.003, use_ema=True),
}


@only_split
@pytest.mark.parametrize("optimizer", LOOP_OPTIMIZERS)
def test_a_loop_of_ones_own(optimizer):
    """It begins with values in the shapes of the variables."""
    x, y = data()

    def losses():
        model = network()
        model.compile(LOOP_OPTIMIZERS[optimizer](), "mse")
        return forms_test.USES["loop"](model, x, y), model

    want, _ = losses()
    shape = harness.fitted((1, 4))
    with parallel(shape).scope():
        got, model = losses()
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert_split(model, shape[1])


@pytest.mark.skipif(BACKEND != "jax", reason="gradients by JAX")
@pytest.mark.parametrize("optimizer", LOOP_OPTIMIZERS)
def test_a_loop_that_is_not_compiled(optimizer):
    import jax

    x, y = data()

    def losses():
        model = network()
        own = LOOP_OPTIMIZERS[optimizer]()
        variables = model.trainable_variables

        def loss_of(values):
            outputs, _ = model.stateless_call(values, [], x)
            return keras.ops.mean((outputs - y) ** 2)

        found = []
        for _ in range(3):
            loss, gradients = jax.value_and_grad(loss_of)(
                [v.value for v in variables]
            )
            own.apply(gradients, variables)
            found.append(float(loss))
        return found, model

    want, _ = losses()
    shape = harness.fitted((1, 4))
    with parallel(shape).scope():
        got, model = losses()
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert_split(model, shape[1])


@only_split
@SHAPES
@pytest.mark.parametrize("form", ["split", "reshape", "unstack"])
def test_it_communicates_as_projections_that_are_apart(form, shape):
    def counted(form):
        with parallel(shape).scope():
            model = network(form)
            model.compile(keras.optimizers.Adam(0.1), "mse")
            planned = distribution.plan_sharding(model, harness.mesh(shape))
            sums = len(planned.reductions)
            return distribution.count_collectives(model, *data()), sums

    fused, sums = counted(form)
    apart, sums_apart = counted("apart")
    assert sums == sums_apart == 4
    whole = fused.pop("all_reduce"), apart.pop("all_reduce")
    assert whole[0][0] <= whole[1][0]
    assert whole[0][1] <= whole[1][1]
    assert all(count == 0 for count, _ in fused.values()), fused


@SHAPES
def test_files(shape, tmp_path):
    _, _, want = reference("adam")
    x, _ = data()
    with parallel(shape).scope():
        model = network()
        trained(model, "adam")
        value = keras.ops.convert_to_numpy(
            model.get_layer("block").qkv.kernel.value
        )
        model.save_weights(tmp_path / "model.weights.h5")
        again = _loaded(network(), tmp_path)
        np.testing.assert_allclose(again.predict(x), want, atol=2e-4)
        assert_split(again, shape[1])
    plain = _loaded(network(), tmp_path)
    np.testing.assert_allclose(plain.predict(x), want, atol=2e-4)
    # Values keep the order of their blocks.
    kernel = plain.get_layer("block").qkv.kernel
    np.testing.assert_array_equal(np.asarray(kernel), value)


def _loaded(model, tmp_path):
    model.load_weights(tmp_path / "model.weights.h5")
    return model


@SHAPES
def test_a_trained_model_is_moved_there_and_back(shape):
    model, plain = network(), network()
    for m in (model, plain):
        m.compile(keras.optimizers.Adam(0.003), "mse")

    def step():
        want = np.ravel(plain.train_on_batch(*data()))[0]
        got = np.ravel(model.train_on_batch(*data()))[0]
        np.testing.assert_allclose(got, want, rtol=1e-5)

    step()
    as_one = distribution.LayoutMap(harness.mesh(shape))
    as_one[".*qkv/kernel"] = (None, "model")
    for current in (
        parallel(shape),
        distribution.ModelParallel(layout_map=as_one),
        parallel(shape),
    ):
        distribution.distribute_model(model, current)
        step()
        step()
    assert_split(model, shape[1])


class Other(layers.Layer):
    """Reads a product in blocks in another way than by taking its blocks."""

    def __init__(self, kind, **kwargs):
        super().__init__(**kwargs)
        self.kind = kind
        self.qkv = layers.Dense(3 * WIDTH, name="qkv")

    def build(self, shape):
        self.qkv.build(shape)
        self.scale = self.add_weight(shape=(3 * WIDTH,), name="scale")
        super().build(shape)

    def call(self, x):
        y = self.qkv(x)
        return {
            "softmax": lambda: ops.softmax(y),
            "slice": lambda: y[..., :WIDTH] * y[..., -WIDTH:],
            "odd_slice": lambda: y[..., 5:11],
            "halves": lambda: ops.multiply(*ops.split(y, 2, -1)),
            "heads": lambda: ops.sum(
                ops.reshape(y, (-1, LENGTH, 6, WIDTH // 2)), 2
            ),
            "cumsum": lambda: ops.cumsum(y, -1) / 10,
            "scaled": lambda: ops.split(y * self.scale, 3, -1)[1],
            "activated": lambda: ops.split(ops.gelu(y), 3, -1)[2],
            "transposed": lambda: ops.matmul(y, ops.transpose(self.qkv.kernel)),
            "repeated": lambda: ops.repeat(y, 2, axis=-1),
            "reversed": lambda: ops.flip(y, -1),
            "joined": lambda: ops.concatenate([y, x], -1),
            "penalty": lambda: y * ops.max(self.qkv.kernel),
            "called_twice": lambda: self.qkv(y[..., WIDTH : 2 * WIDTH]),
        }[self.kind]()


@only_split
@pytest.mark.parametrize(
    "kind",
    [
        "softmax",
        "slice",
        "odd_slice",
        "halves",
        "heads",
        "cumsum",
        "scaled",
        "activated",
        "transposed",
        "repeated",
        "reversed",
        "joined",
        "penalty",
        "called_twice",
    ],
)
def test_a_product_in_blocks_is_a_tensor_like_others(kind):
    """A map splits the blocks, whatever the model does with them."""

    def build():
        keras.utils.set_random_seed(1)
        inputs = keras.Input((LENGTH, WIDTH))
        x = Other(kind, name="other")(inputs)
        model = keras.Model(inputs, layers.Dense(3)(x))
        model.compile(keras.optimizers.Adam(0.003), "mse")
        return model

    plain = build()
    want = [float(plain.train_on_batch(*data())) for _ in range(3)]
    shape = harness.fitted((1, 4))
    layout_map = distribution.LayoutMap(harness.mesh(shape))
    for name, axes in (("kernel", (None, "model")), ("bias", ("model",))):
        layout = distribution.TensorLayout(axes)
        layout.blocks = {len(axes) - 1: 3}
        layout_map[f".*qkv/{name}"] = layout
    with distribution.ModelParallel(layout_map=layout_map).scope():
        model = build()
        got = [float(model.train_on_batch(*data())) for _ in range(3)]
        outputs = np.asarray(keras.ops.convert_to_numpy(model(data()[0])))
        rows = {r.path: r for r in distribution.describe(model).rows}
        held = rows["other/qkv/kernel"].device_bytes.values()
        assert set(held) == {3 * WIDTH * WIDTH * 4 // shape[1]}
    np.testing.assert_allclose(got, want, rtol=1e-5)
    np.testing.assert_allclose(outputs, plain.predict(data()[0]), atol=2e-4)


def test_blocks_that_do_not_divide_are_refused():
    mesh = harness.mesh(harness.fitted((1, 4)))
    layout_map = distribution.LayoutMap(mesh)
    layout = distribution.TensorLayout((None, "model"), mesh)
    layout.blocks = {1: 5}
    layout_map[".*qkv/kernel"] = layout
    with distribution.ModelParallel(layout_map=layout_map).scope():
        with pytest.raises(ValueError, match="cannot consist of 5 blocks"):
            network()


def test_the_plan_is_the_same_in_its_file():
    mesh = harness.mesh(harness.fitted((1, 4)))
    plan = distribution.plan_sharding(network, mesh)
    for name, count in FUSED.items():
        row = plan[f"block/{name}/kernel"]
        assert (row.axes, row.blocks) == ((None, "model"), count)
        assert plan.device_bytes(row) * mesh.shape[1] == row.nbytes
    again = distribution.ShardingPlan.from_json(plan.to_json(), mesh)
    assert again.variables == plan.variables
    assert plan.split_share > 0.8
    with again.distribution().scope():
        model = network()
    assert_split(model, mesh.shape[1])
