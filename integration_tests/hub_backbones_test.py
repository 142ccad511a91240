"""Every backbone of KerasHub, split by its plan, against one device.

`benchmarks/plan_survey.py` has the models. They are tiny, with random weights.
`KERAS_TP_HUB=DINOV2,SAM` runs these alone.
"""

import os

import keras
import numpy as np
import pytest

from integration_tests import harness
from integration_tests import hub_backbones
from keras_tp import distribution

# CI has time for one, which reads weights while it is made. It has as many
# devices as heads.
QUICK = ["DINOV2"]
# Of the largest number; many of these models have no scale to speak of.
TOLERANCE = 2e-4
# Rounding alone moves these more in float32.
IN_FLOAT64 = ("BLIP2", "EdRec")
TOLERANCES = {}
if keras.config.backend() == "jax":
    # JAX has no float64 by default. BLIP2 normalizes its small query tokens,
    # so an error of rounding in them grows by 1000.
    IN_FLOAT64, TOLERANCES = (), {"BLIP2": 5e-4}


def names():
    given = os.environ.get("KERAS_TP_HUB")
    if given:
        return given.split(",")
    if os.environ.get("KERAS_TP_SLOW") != "1":
        return QUICK
    return [
        name
        for name in hub_backbones.survey()[0]
        if name not in hub_backbones.NOT_TRAINED
    ]


def numbers(structure):
    """Returns the float arrays of a structure."""
    found = [np.asarray(leaf) for leaf in keras.tree.flatten(structure)]
    return [array for array in found if array.dtype.kind == "f"]


# Model -> all-reduces that its plan lacks, if their bytes are not predicted.
BYTES_NOT_PREDICTED = {}
if keras.config.backend() == "torch":
    BYTES_NOT_PREDICTED = {
        # DTensor sums gradients of its stacked streams one by one.
        "Gemma3n": 10,
        # DTensor sums a gradient after it has passed a resize.
        "MobileNetV5": 0,
    }


def assert_counted_as_planned(name, plan, model, x, outputs, targets):
    """The collectives of the plan and of the loss, to the byte, or it says so.

    The mean of a split output, along its last dim, is one more all-reduce.
    """
    counted = distribution.count_collectives(model, x, targets)
    found = {kind: tuple(pair) for kind, pair in counted.items() if pair[0]}
    expected = hub_backbones.predicted(plan, outputs)
    if name in BYTES_NOT_PREDICTED:
        numbers_of = {kind: pair[0] for kind, pair in expected.items()}
        numbers_of["all_reduce"] += BYTES_NOT_PREDICTED[name]
        assert {kind: pair[0] for kind, pair in found.items()} == numbers_of
        return
    if not hub_backbones.reasons(plan):
        assert found == expected


def run(build, spec, weights=None):
    """Returns a model, a batch, targets, its outputs before and after a step.

    Last are the weights at first.
    """
    keras.utils.set_random_seed(3)
    model = build()
    if weights is None:
        weights = model.get_weights()
    else:
        model.set_weights(weights)
    x = hub_backbones.inputs_of(model, spec)
    before = model.predict_on_batch(x)
    targets = keras.tree.map_structure(np.zeros_like, before)
    hub_backbones.compile_model(model)
    model.train_on_batch(x, targets)
    after = model.predict_on_batch(x)
    return (model, x, targets), before, after, weights


def run_split(name, build, spec, weights):
    """Returns a distribution, and what `run` returns under it."""
    mesh = harness.mesh(harness.fitted((1, 4 if name in QUICK else 2)))
    plan = hub_backbones.plan_of(name, mesh)
    # DeepLabV3 has a kernel above 1 MiB that is not split.
    strict = name != "DeepLabV3"
    parallel = distribution.TensorParallel(plan=plan, strict=strict)
    with parallel.scope():
        return parallel, run(build, spec, weights)


@pytest.mark.parametrize("name", names())
def test_backbone(name, request):
    pytest.importorskip("keras_hub")
    if name in IN_FLOAT64:
        request.addfinalizer(lambda: keras.config.set_floatx("float32"))
        keras.config.set_floatx("float64")
    builders, specs, _ = hub_backbones.survey()
    build, spec = builders[name], specs.get(name)
    _, *expected, weights = run(build, spec)
    expected = [numbers(outputs) for outputs in expected]
    assert any(
        not np.array_equal(a, b) for a, b in zip(*expected, strict=True)
    ), "the train step changed nothing"
    if name in hub_backbones.REFUSED:
        refused = hub_backbones.REFUSED[name]
        with pytest.raises(NotImplementedError, match=refused):
            run_split(name, build, spec, weights)
        return
    parallel, ((model, x, targets), *found, _) = run_split(
        name, build, spec, weights
    )
    assert harness.split_paths(model)
    tolerance = TOLERANCES.get(name, TOLERANCE)
    for kind, ours, theirs in zip(("first", "trained"), found, expected):
        for a, b in zip(numbers(ours), theirs, strict=True):
            largest = np.abs(b).max() or 1.0
            np.testing.assert_allclose(
                a, b, rtol=0, atol=tolerance * largest, err_msg=kind
            )
    if name in IN_FLOAT64:
        # Plans are of the usual dtype.
        keras.config.set_floatx("float32")
        parallel, ((model, x, targets), *found, _) = run_split(
            name, build, spec, weights
        )
    if keras.config.backend() != "jax":
        # XLA for CPUs sums the gradients of some projections one by one.
        assert_counted_as_planned(
            name, parallel.plan, model, x, found[0], targets
        )
