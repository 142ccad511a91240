"""Logits of a split vocabulary are never gathered, for losses, metrics, draws.

Losses, metrics and results are equal to those of one device. A step sends a few
numbers for each token, not its logits.
"""

import functools
import pathlib

import keras
import numpy as np
import pytest
from keras import layers
from keras import losses
from keras import metrics
from keras import ops

from integration_tests import harness
from keras_tp import backend
from keras_tp import distribution

BACKEND = keras.config.backend()
BATCH, LENGTH, HIDDEN, CLASSES = 4, 6, 8, 512
# Bytes of one float32 for each token of a batch.
TOKENS = BATCH * LENGTH * 4
SHAPES = harness.shapes((1, 2), slow=[(1, 4), (2, 2)])
LAYOUTS = {"head/kernel": (None, "model"), "head/bias": ("model",)}
K = 5

rng = np.random.default_rng(0)
X = rng.standard_normal((BATCH, LENGTH, HIDDEN)).astype("float32")
# One sample has a token that is masked.
X[1, 4:] = 0
CLASS = rng.integers(1, CLASSES, (BATCH, LENGTH)).astype("int32")
CLASS[2, 3:] = 0
ONE_HOT = np.eye(CLASSES, dtype="float32")[CLASS]
WEIGHTS = rng.uniform(0.5, 2, (BATCH, LENGTH)).astype("float32")

sparse = functools.partial(losses.SparseCategoricalCrossentropy, True)
dense = functools.partial(losses.CategoricalCrossentropy, True)


def perplexity():
    hub = pytest.importorskip("keras_hub")
    return hub.metrics.Perplexity(from_logits=True, mask_token_id=0)


# Name -> loss, targets, metric, and arguments of `model_of`.
CASES = {
    "sparse": (sparse, CLASS, None, {}),
    "ignored class": (
        lambda: sparse(ignore_class=0),
        CLASS,
        None,
        {},
    ),
    "masked": (sparse, CLASS, None, {"masked": True}),
    "dense": (dense, ONE_HOT, None, {}),
    "smooth": (lambda: dense(label_smoothing=0.1), ONE_HOT, None, {}),
    "sparse probabilities": (
        losses.SparseCategoricalCrossentropy,
        CLASS,
        None,
        {"activation": "softmax"},
    ),
    "dense probabilities": (
        losses.CategoricalCrossentropy,
        ONE_HOT,
        None,
        {"activation": "softmax"},
    ),
    "focal": (
        lambda: losses.CategoricalFocalCrossentropy(from_logits=True),
        ONE_HOT,
        None,
        {},
    ),
    "divergence": (
        losses.KLDivergence,
        ONE_HOT,
        None,
        {"activation": "softmax"},
    ),
    "accuracy": (sparse, CLASS, lambda: "accuracy", {}),
    "dense accuracy": (dense, ONE_HOT, lambda: "accuracy", {}),
    "top k": (
        sparse,
        CLASS,
        lambda: metrics.SparseTopKCategoricalAccuracy(K, name="metric"),
        {},
    ),
    "dense top k": (
        dense,
        ONE_HOT,
        lambda: metrics.TopKCategoricalAccuracy(K, name="metric"),
        {},
    ),
    "cross-entropy": (
        sparse,
        CLASS,
        lambda: metrics.SparseCategoricalCrossentropy(from_logits=True),
        {},
    ),
    "perplexity": (sparse, CLASS, perplexity, {}),
}


def model_of(loss, metric=None, masked=False, activation=None):
    keras.utils.set_random_seed(1)
    inputs = x = keras.Input((LENGTH, HIDDEN))
    if masked:
        x = layers.Masking()(x)
    x = layers.Dense(CLASSES, activation=activation, name="head")(x)
    model = keras.Model(inputs, x)
    model.compile(
        keras.optimizers.SGD(0.1),
        loss(),
        weighted_metrics=[] if metric is None else [metric()],
    )
    return model


def trained(model, targets):
    """Returns losses and metrics of three steps, and the weights then."""
    logs = [
        model.train_on_batch(X, targets, WEIGHTS, return_dict=True)
        for _ in range(3)
    ]
    return logs, [ops.convert_to_numpy(v) for v in model.weights]


@pytest.mark.parametrize("name", CASES)
@SHAPES
def test_losses_and_metrics(shape, name):
    loss, targets, metric, arguments = CASES[name]
    logs, weights = trained(model_of(loss, metric, **arguments), targets)
    with harness.model_parallel(LAYOUTS, shape).scope():
        model = model_of(loss, metric, **arguments)
    counted = distribution.count_collectives(model, X, targets)
    split_logs, split_weights = trained(model, targets)
    for one, split in zip(logs, split_logs):
        assert one.keys() == split.keys()
        for key in one:
            np.testing.assert_allclose(split[key], one[key], 1e-5, err_msg=key)
    for one, split in zip(weights, split_weights):
        np.testing.assert_allclose(split, one, rtol=1e-5, atol=1e-6)
    # Candidates of all devices are gathered: values and indices.
    candidates = K * shape[1] * 12
    gradients = 0
    if shape[0] > 1:
        gradients = HIDDEN * CLASSES // shape[1] * 4 + CLASSES // shape[1] * 4
    sent = sum(size for _, size in counted.values()) - gradients
    assert counted["all_reduce"][0]
    assert counted["all_to_all"][0] == counted["collective_permute"][0] == 0
    assert sent <= TOKENS * (12 + (candidates / 4 if metric else 0))
    assert sent < TOKENS * CLASSES / shape[0] / shape[1]


PAGE = pathlib.Path(__file__).parent.parent / "docs" / "plans.md"
# Words of a row of the page -> its losses, with their targets.
PAGE_LOSSES = {
    "mean squared": [
        (losses.MeanSquaredError, ONE_HOT),
        (losses.MeanAbsoluteError, ONE_HOT),
        (losses.Huber, ONE_HOT),
        (losses.Hinge, ONE_HOT),
        (losses.Poisson, ONE_HOT),
        (losses.BinaryCrossentropy, ONE_HOT),
        (lambda: losses.BinaryCrossentropy(from_logits=True), ONE_HOT),
    ],
    "Kullback": [(losses.KLDivergence, ONE_HOT)],
    "cosine": [(losses.CosineSimilarity, ONE_HOT)],
    "of logits": [(sparse, CLASS), (dense, ONE_HOT)],
    "of probabilities": [
        (losses.SparseCategoricalCrossentropy, CLASS),
        (losses.CategoricalCrossentropy, ONE_HOT),
    ],
}


def counts_of_the_page():
    """Returns the words of each row about a loss, and its counts."""
    part = PAGE.read_text().partition("## All-reduces of a loss")[2]
    rows = [
        [cell.strip() for cell in line.strip("| ").split("|")]
        for line in part.partition("\n## ")[0].splitlines()
        if line.startswith("|")
    ]
    names, _, *rows = rows
    column = [name.lower() for name in names].index(BACKEND)
    return {row[0]: int(row[column]) for row in rows}


@pytest.mark.parametrize("words", PAGE_LOSSES)
def test_the_page_has_the_sums_of_a_loss(words):
    (want,) = (n for name, n in counts_of_the_page().items() if words in name)
    for loss, targets in PAGE_LOSSES[words]:
        with harness.model_parallel(LAYOUTS, (1, 2)).scope():
            model = model_of(loss)
        counted = distribution.count_collectives(model, X, targets)
        count, size = counted.pop("all_reduce")
        assert count == want, loss
        assert 4 * count <= size <= TOKENS * count
        assert not any(count for count, _ in counted.values())


def test_the_page_has_no_other_row():
    found = counts_of_the_page()
    assert len(found) == len(PAGE_LOSSES)


def head(function, size, classes=CLASSES):
    """Returns a model: a layer of logits, and a function of them."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((HIDDEN,), batch_size=size)
    logits = layers.Dense(classes, name="head")(inputs)
    return keras.Model(inputs, layers.Lambda(function)(logits))


def draw(logits, count=1):
    return keras.random.categorical(logits, count, seed=3)


def ordered(values):
    return ops.sort(values, -1)


# Name -> function of logits, and the sent bytes for each sample and device.
FUNCTIONS = {
    "argmax": (lambda x: ops.argmax(x, -1), 12),
    "argmin": (lambda x: ops.argmin(x, -1), 12),
    "first of equal values": (lambda x: ops.argmax(ops.round(x), -1), 12),
    "values": (lambda x: ops.top_k(x, K)[0], 12 * K),
    "indices": (lambda x: ops.top_k(x, K)[1], 16 * K),
    "unsorted": (lambda x: ordered(ops.top_k(x, K, False)[0]), 12 * K),
    "first of equal indices": (
        lambda x: ops.top_k(ops.round(x), 1)[1],
        12,
    ),
    "is in the top k": (lambda x: ops.in_top_k(ops.argmin(-x, -1), x, K), 80),
    "is not": (lambda x: ops.in_top_k(ops.argmin(x, -1), x, K), 80),
    "draw": (draw, 24),
    "of each": (
        lambda x: ops.take_along_axis(x, ops.argmax(-x, -1)[:, None], -1),
        20,
    ),
    "from the end": (
        lambda x: ops.take_along_axis(
            x, ops.argmax(x, -1)[:, None] - CLASSES, -1
        ),
        20,
    ),
    "sum of exponentials": (lambda x: ops.logsumexp(x, -1), 12),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@SHAPES
def test_functions_of_logits(shape, name):
    function, bytes_of_one = FUNCTIONS[name]
    x = X[:, 0] * 3
    plain = head(function, BATCH).predict(x, batch_size=BATCH, verbose=0)
    with harness.model_parallel(LAYOUTS, shape).scope():
        model = head(function, BATCH)
    counted = distribution.count_collectives(model, x)
    found = model.predict(x, batch_size=BATCH, verbose=0)
    if name == "draw" and BACKEND == "tensorflow":
        # TensorFlow's own draws depend on its threads.
        mesh = harness.model_parallel(LAYOUTS, (1, 1))
        with mesh.scope():
            model = head(function, BATCH)
        plain = model.predict(x, batch_size=BATCH, verbose=0)
    np.testing.assert_allclose(found, plain, 1e-6)
    sent = sum(size for _, size in counted.values())
    assert 0 < sent <= bytes_of_one * BATCH * shape[1]
    assert sent < BATCH * CLASSES * 4 / shape[0] / shape[1]


@pytest.mark.skipif(
    not backend.distribution_lib.splits_unevenly(),
    reason="all parts of a variable have one size",
)
@pytest.mark.parametrize("name", ["argmax", "values", "indices", "draw"])
def test_a_vocabulary_that_the_devices_do_not_divide(name):
    function, bytes_of_one = FUNCTIONS[name]
    shape = harness.fitted((1, 4))
    classes = CLASSES + 1
    x = X[:, 0] * 3
    plain = head(function, BATCH, classes)
    expected = plain.predict(x, batch_size=BATCH, verbose=0)
    mesh = harness.mesh(shape)
    layout_map = distribution.LayoutMap(mesh)
    for path, axes in LAYOUTS.items():
        layout_map[path] = distribution.TensorLayout(axes, mesh)
        layout_map[path].uneven = True
    parallel = distribution.ModelParallel(layout_map=layout_map)
    with parallel.scope():
        model = head(function, BATCH, classes)
    counted = distribution.count_collectives(model, x)
    found = model.predict(x, batch_size=BATCH, verbose=0)
    np.testing.assert_allclose(found, expected, 1e-6)
    sent = sum(size for _, size in counted.values())
    assert 0 < sent <= bytes_of_one * BATCH * shape[1]
