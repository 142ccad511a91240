"""Sums of gradients of inputs run beside products of kernels' gradients."""

import keras
import numpy as np
import pytest
from keras import layers
from keras import tree

if keras.config.backend() != "torch":
    pytest.skip("the torch backend", allow_module_level=True)

from keras_tp.backend.torch import processes

WORLD = processes.world_size()
if WORLD < 2:
    pytest.skip("needs several processes", allow_module_level=True)

import torch
from torch.distributed import all_gather_object
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import keras_tp
from keras_tp import distribution
from keras_tp.backend.torch import overlap
from keras_tp.distribution.tensor_layout import TensorLayout

BATCH, LENGTH, WIDTH, HEADS, WORDS = 4, 12, 32, 4, 64
ACTIVATION = BATCH * LENGTH * WIDTH * 4
LAYOUTS = {
    "lookup/embeddings": ("model", None),
    ".*(query|key|value)/kernel": (None, "model", None),
    ".*(query|key|value)/bias": ("model", None),
    ".*attention_output/kernel": ("model", None, None),
    ".*up.*/kernel": (None, "model"),
    ".*up.*/bias": ("model",),
    ".*down.*/kernel": ("model", None),
}
RNG = np.random.default_rng(0)
IDS = RNG.integers(0, WORDS, (BATCH, LENGTH)).astype("int32")
TARGETS = RNG.normal(size=(BATCH, LENGTH, WIDTH)).astype("float32")
# Shapes of the gradients of this process's kernels.
PROJECTION, UP = (WIDTH, WIDTH // WORLD), (WIDTH, 3 * WIDTH // WORLD)
# What runs while the gradients of the inputs of `up` and of the attention are
# added up, from the last block to the first.
BESIDE_A_BLOCK = [[UP], [PROJECTION] * 3]

pytestmark = pytest.mark.filterwarnings("ignore:The pattern")


@pytest.fixture(autouse=True)
def reset():
    yield
    distribution.set_distribution(None)
    keras_tp.uninstall()
    keras.utils.clear_session()


class Recorder(TorchDispatchMode):
    """Notes in order "launch", "wait", and the shapes of products.

    Attributes:
        noted: List of all.
        beside: List with the shapes of the products between each launch and
            its wait.
    """

    def __init__(self):
        super().__init__()
        self.noted, self.beside = [], []
        # Address of a result -> its list in `beside`.
        self.under_way = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if name.startswith(("all_reduce", "reduce_scatter", "all_gather")):
            self.noted.append("launch")
            self.beside.append([])
            for tensor in tree.flatten(result):
                self.under_way[tensor.data_ptr()] = self.beside[-1]
        elif name == "wait_tensor":
            self.noted.append("wait")
            self.under_way.pop(result.data_ptr(), None)
        elif name == "mm":
            self.noted.append(tuple(result.shape))
            for shapes in self.under_way.values():
                shapes.append(tuple(result.shape))
        return result


def distributed(data=1, flagged=False):
    """Returns a `ModelParallel` over all processes."""
    if WORLD // data < 2:
        pytest.skip("needs more processes")
    mesh = distribution.DeviceMesh((data, WORLD // data), ["batch", "model"])
    layout_map = distribution.LayoutMap(mesh)
    for pattern, axes in LAYOUTS.items():
        layout_map[pattern] = TensorLayout(axes, mesh)
        layout_map[pattern].sequence_parallel = (
            flagged and "bias" not in pattern
        )
    return distribution.ModelParallel(
        layout_map=layout_map, batch_dim_name="batch"
    )


def make_model(count=2):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, WIDTH, name="lookup")(inputs)
    for i in range(count):
        h = layers.LayerNormalization(name=f"norm_a{i}")(x)
        attention = layers.MultiHeadAttention(
            HEADS, WIDTH // HEADS, name=f"attention_{i}"
        )
        x = x + attention(h, h, use_causal_mask=True)
        h = layers.LayerNormalization(name=f"norm_b{i}")(x)
        h = layers.Dense(3 * WIDTH, activation="gelu", name=f"up_{i}")(h)
        x = x + layers.Dense(WIDTH, name=f"down_{i}")(h)
    return keras.Model(inputs, x)


def loss_of(model):
    difference = model(torch.tensor(IDS)) - torch.tensor(TARGETS)
    return (difference * difference).mean()


def gradients_of(model):
    return [
        keras.ops.convert_to_numpy(variable.value.grad)
        for variable in model.trainable_variables
    ]


def recorded(loss):
    """Runs the backward pass of a loss; returns the `Recorder`."""
    with Recorder() as recorder:
        loss.backward()
    assert not recorder.under_way
    return recorder


def assert_close(found, expected, **tolerances):
    tolerances = tolerances or dict(rtol=1e-5, atol=1e-6)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, **tolerances)


def one_after_the_other(monkeypatch):
    """Sums are launched after the products, and waited for at once."""
    monkeypatch.setattr(overlap, "number_below", lambda tensor: None)
    monkeypatch.setattr(overlap, "launched", overlap.complete)


def test_sums_are_launched_before_the_products_of_kernels():
    loss_of(one := make_model()).backward()
    with distributed().scope():
        model = make_model()
        recorder = recorded(loss_of(model))
        assert recorder.beside == BESIDE_A_BLOCK * 2
        kernels = [n for n in recorder.noted if n in (PROJECTION, UP)]
        assert len(kernels) == 8
        found = gradients_of(model)
    assert_close(found, gradients_of(one))


def test_processes_agree_on_the_order():
    with distributed().scope():
        noted = recorded(loss_of(make_model())).noted
        everywhere = [None] * WORLD
        all_gather_object(everywhere, noted)
    assert noted.count("launch") == 4
    assert everywhere == [noted] * WORLD


def test_collectives_and_numbers_are_those_of_one_after_the_other(monkeypatch):
    def trained():
        with distributed().scope():
            model = make_model()
            model.compile(keras.optimizers.SGD(0.1), "mse")
            counted = distribution.count_collectives(model, IDS, TARGETS)
            for _ in range(3):
                loss = model.train_on_batch(IDS, TARGETS)
            return counted, loss, [w.numpy() for w in model.weights]

    counted, loss, weights = trained()
    # A lookup, and two sums in each direction for each block.
    assert counted["all_reduce"] == (9, 9 * ACTIVATION)
    one_after_the_other(monkeypatch)
    assert trained()[:2] == (counted, loss)
    assert_close(weights, trained()[2], rtol=0)


def test_frozen_kernels_have_no_product():
    with distributed().scope():
        model = make_model(1)
        model.get_layer("up_0").kernel.trainable = False
        model.get_layer("attention_0").query_dense.trainable = False
        loss = loss_of(model)
        recorder = recorded(loss)
        assert recorder.beside == [[], [PROJECTION] * 2]
        assert UP not in recorder.noted


def test_an_input_without_a_gradient_has_no_sum():
    with distributed().scope():
        model = make_model(1)
        model.get_layer("lookup").trainable = False
        model.get_layer("norm_a0").trainable = False
        assert recorded(loss_of(model)).beside == BESIDE_A_BLOCK[:1]


@pytest.mark.parametrize("wanted", ["kernels", "activations"])
def test_gradients_that_are_asked_for(wanted):
    def found(model):
        if wanted == "kernels":
            values = [v.value for v in model.trainable_variables]
            return torch.autograd.grad(loss_of(model), values)
        part = keras.Model(
            model.inputs,
            [model.get_layer("norm_b0").output, *model.outputs],
        )
        norm, outputs = part(torch.tensor(IDS))
        return torch.autograd.grad((outputs * outputs).mean(), [norm])

    expected = found(make_model(1))
    with distributed().scope():
        results = found(make_model(1))
        if wanted == "activations":
            placed = results[0].placements
            assert all(placement.is_replicate() for placement in placed)
        results = [keras.ops.convert_to_numpy(result) for result in results]
    assert_close(results, [e.numpy() for e in expected])


def test_a_gradient_that_is_retained():
    def found():
        model = make_model(1)
        layer = model.get_layer("norm_b0")
        part = keras.Model(model.inputs, [layer.output, *model.outputs])
        norm, outputs = part(torch.tensor(IDS))
        norm.retain_grad()
        (outputs * outputs).mean().backward()
        return keras.ops.convert_to_numpy(norm.grad)

    expected = found()
    with distributed().scope():
        assert_close([found()], [expected])


def test_second_derivatives():
    def found():
        # Attention has no second derivative on CPUs.
        keras.utils.set_random_seed(1)
        inputs = keras.Input((LENGTH,), dtype="int32")
        x = layers.Embedding(WORDS, WIDTH, name="lookup")(inputs)
        x = norm = layers.LayerNormalization(name="norm")(x)
        x = layers.Dense(3 * WIDTH, activation="gelu", name="up")(x)
        x = layers.Dense(WIDTH, name="down")(x) * norm
        model = keras.Model(inputs, x)
        loss = loss_of(model)
        kernels = [
            model.get_layer("lookup").embeddings.value,
            model.get_layer("norm").gamma.value,
            model.get_layer("up").kernel.value,
        ]
        first = torch.autograd.grad(loss, kernels, create_graph=True)
        sum((gradient * gradient).sum() for gradient in first).backward()
        return gradients_of(model)

    expected = found()
    with distributed().scope():
        assert_close(found(), expected, rtol=1e-4, atol=1e-6)


def test_a_graph_that_is_used_twice():
    def found():
        model = make_model(1)
        loss = loss_of(model)
        loss.backward(retain_graph=True)
        loss.backward()
        return gradients_of(model)

    expected = found()
    with distributed().scope():
        assert_close(found(), expected)


def test_a_backward_pass_that_failed():
    def failing(gradient):
        raise ZeroDivisionError

    loss_of(one := make_model(1)).backward()
    with distributed().scope():
        model = make_model(1)
        loss = loss_of(model)
        kernel = model.get_layer("up_0").kernel.value
        hook = kernel.register_hook(failing)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        hook.remove()
        model.zero_grad()
        loss_of(model).backward()
        found = gradients_of(model)
    assert_close(found, gradients_of(one))


def test_writing_into_an_output_that_autograd_needs_is_an_error():
    with distributed().scope():
        model = keras.Sequential(
            [
                keras.Input((LENGTH, WIDTH)),
                layers.Dense(3 * WIDTH, name="up"),
                layers.Dense(WIDTH, name="down"),
                layers.Activation("sigmoid"),
            ]
        )
        outputs = model(torch.tensor(TARGETS))
        outputs += 1
        with pytest.raises(RuntimeError, match="modified by an inplace"):
            outputs.sum().backward()


def test_a_mask_that_a_layer_sets_stays():
    class Masked(layers.Layer):
        def call(self, x):
            y = x * 2
            y._keras_mask = torch.ones(BATCH, LENGTH, dtype=bool)
            return y

    with distributed().scope():
        x = layers.Embedding(WORDS, WIDTH, name="lookup")(torch.tensor(IDS))
        y = Masked()(x)
    assert isinstance(y, DTensor) and y.requires_grad
    assert y._keras_mask.shape == (BATCH, LENGTH)


def test_outputs_of_a_model_have_one_node():
    with distributed().scope():
        inner = keras.Sequential(
            [
                layers.Dense(3 * WIDTH, name="up"),
                layers.Dense(WIDTH, name="down"),
            ]
        )
        model = keras.Sequential([keras.Input((LENGTH, WIDTH)), inner])
        node = model(torch.tensor(TARGETS)).grad_fn
    assert hasattr(node, "number")
    assert not hasattr(node.next_functions[0][0], "number")


def trained(policy=None, remat=None, accumulation=None, steps=4, lora=False):
    keras.config.set_dtype_policy(policy or "float32")
    try:
        if remat is None:
            model = make_model()
        else:
            names = ["attention_0", "up_1", "norm_b0"]
            with keras.RematScope(mode=remat, layer_names=names):
                model = make_model()
        if lora:
            model.get_layer("up_0").enable_lora(2)
        optimizer = keras.optimizers.SGD(
            0.05, gradient_accumulation_steps=accumulation
        )
        model.compile(optimizer, "mse")
        losses = [model.train_on_batch(IDS, TARGETS) for _ in range(steps)]
        return losses, [w.numpy() for w in model.weights], model
    finally:
        keras.config.set_dtype_policy("float32")


@pytest.mark.parametrize(
    "ways",
    [
        dict(remat="full"),
        dict(remat="list_of_layers"),
        dict(accumulation=2),
        dict(policy="mixed_float16"),
        dict(policy="mixed_bfloat16"),
        dict(lora=True),
    ],
    ids=lambda ways: "-".join(map(str, *ways.items())),
)
@pytest.mark.parametrize("data", [1, 2])
def test_training_is_that_of_one_device(ways, data):
    losses, weights, _ = trained(**ways)
    with distributed(data).scope():
        found = trained(**ways)
        recorder = recorded(loss_of(found[2]))
    tolerance = 2e-2 if "policy" in ways else 1e-5
    assert_close(found[0], losses, rtol=tolerance)
    assert_close(found[1], weights, rtol=tolerance, atol=tolerance)
    # On CPUs Keras casts the inputs of products in float16. A cast is not the
    # output of a layer.
    if data == 1 and ways.get("policy") != "mixed_float16":
        beside = [n for n in recorder.noted if n in (UP, PROJECTION)]
        found = [n for shapes in recorder.beside for n in shapes]
        assert len(beside) == 8
        assert [n for n in found if n in (UP, PROJECTION)] == beside


def test_reduce_scatters_of_sequence_parallelism():
    loss_of(one := make_model()).backward()
    with distributed(flagged=True).scope():
        model = make_model()
        recorder = recorded(loss_of(model))
        beside = [shapes for shapes in recorder.beside if shapes]
        assert beside == BESIDE_A_BLOCK * 2
        found = gradients_of(model)
    assert_close(found, gradients_of(one))


def counted(build):
    """Returns counts of a step on the devices, checked against one device."""
    images = np.random.default_rng(1).normal(size=(BATCH, LENGTH, WIDTH))
    images = images.astype("float32")

    def trained():
        keras.utils.set_random_seed(1)
        inputs = keras.Input((LENGTH, WIDTH))
        model = keras.Model(inputs, build(inputs))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model, [model.train_on_batch(images, TARGETS) for _ in range(3)]

    expected = trained()[1]
    with distributed().scope():
        model, losses = trained()
        found = distribution.count_collectives(model, images, TARGETS)
    assert_close(losses, expected)
    return found


class Gated(layers.Layer):
    """The product of two activations goes into a column-parallel kernel."""

    def build(self, shape):
        self.gate = layers.Dense(WIDTH, name="gate")
        self.linear = layers.Dense(WIDTH, name="linear")
        self.up = layers.Dense(3 * WIDTH, name="up")
        for layer in (self.gate, self.linear, self.up):
            layer.build(shape)

    def call(self, x):
        x = self.linear(x) * keras.ops.sigmoid(self.gate(x))
        return self.up(keras.ops.reshape(x, (-1, LENGTH, WIDTH)))


def test_the_gradient_of_a_product_of_activations_is_summed_once():
    def build(x):
        return layers.Dense(WIDTH, name="down")(Gated()(x))

    assert counted(build)["all_reduce"] == (2, 2 * ACTIVATION)


def test_each_device_takes_its_heads_of_whole_ones():
    def heads(count, name):
        shape = (None, count, WIDTH // HEADS)
        return layers.EinsumDense("bqm,muh->bquh", shape, name=name)

    def build(x):
        query, key = heads(HEADS, "query")(x), heads(1, "shared")(x)
        # KerasHub's Mixtral writes its attention in this way.
        key = keras.ops.repeat(key, HEADS, axis=2)
        scores = keras.ops.einsum("bquh,bkuh->buqk", query, key)
        x = keras.ops.einsum("buqk,bkuh->bquh", keras.ops.softmax(scores), key)
        return layers.EinsumDense(
            "bquh,uhm->bqm", (None, WIDTH), name="attention_output"
        )(x)

    found = counted(build)
    assert not found["all_gather"].count
    # The output, and the gradient of the keys, which both products read.
    assert found["all_reduce"].count == 2
