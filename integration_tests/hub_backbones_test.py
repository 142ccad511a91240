"""Every backbone of KerasHub, split by its plan, against one device.

`benchmarks/plan_survey.py` has the models. They are tiny, with random weights.
`KERAS_TP_HUB=DINOV2,SAM` runs these alone.
"""

import contextlib
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
# BLIP2 normalizes its small query tokens, so an error of rounding in them grows
# by 1000.
TOLERANCES = {"BLIP2": 5e-4}
# Rounding alone moves these more in float32. JAX has no float64 in tests.
IN_FLOAT64, EXACT = (), 1e-9
if keras.config.backend() != "jax":
    IN_FLOAT64 = ("BLIP2", "EdRec")


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


# Model -> all-reduces that its plan lacks, if their bytes are not predicted.
BYTES_NOT_PREDICTED = {}
if keras.config.backend() == "torch":
    BYTES_NOT_PREDICTED = {
        # DTensor sums a gradient of its stacked streams twice.
        "Gemma3n": 1,
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


def run_split(name, build, spec, weights):
    """Returns a distribution, and what `hub_backbones.run` returns."""
    mesh = harness.mesh(harness.fitted((1, 4 if name in QUICK else 2)))
    plan = hub_backbones.plan_of(name, mesh)
    # DeepLabV3 has a kernel above 1 MiB that is not split.
    strict = name != "DeepLabV3"
    parallel = distribution.TensorParallel(plan=plan, strict=strict)
    with parallel.scope():
        return parallel, hub_backbones.run(build, spec, weights)


@pytest.mark.parametrize("name", names())
def test_backbone(name):
    pytest.importorskip("keras_hub")
    builders, specs, _ = hub_backbones.survey()
    build, spec = builders[name], specs.get(name)
    if name in hub_backbones.REFUSED:
        refused = hub_backbones.REFUSED[name]
        *_, weights = hub_backbones.run(build, spec)
        with pytest.raises(NotImplementedError, match=refused):
            run_split(name, build, spec, weights)
        return
    is_exact = name in IN_FLOAT64
    with hub_backbones.in_float64() if is_exact else contextlib.nullcontext():
        weights, found = assert_as_on_one_device(name, build, spec)
    if is_exact:
        # Plans are of the usual dtype.
        found = run_split(name, build, spec, weights)
    if keras.config.backend() != "jax":
        # XLA for CPUs sums the gradients of some projections one by one.
        parallel, ((model, x, targets), before, *_) = found
        assert_counted_as_planned(
            name, parallel.plan, model, x, before, targets
        )


def assert_as_on_one_device(name, build, spec):
    """Returns the weights at first, and what `run_split` returns."""
    _, *expected, weights = hub_backbones.run(build, spec)
    expected = [hub_backbones.numbers(outputs) for outputs in expected]
    assert any(
        not np.array_equal(a, b) for a, b in zip(*expected, strict=True)
    ), "the train step changed nothing"
    found = run_split(name, build, spec, weights)
    _, ((model, *_), *outputs, _) = found
    assert harness.split_paths(model)
    tolerance = TOLERANCES.get(name, TOLERANCE)
    if name in IN_FLOAT64:
        tolerance = EXACT
    for kind, ours, theirs in zip(("first", "trained"), outputs, expected):
        for a, b in zip(hub_backbones.numbers(ours), theirs, strict=True):
            largest = np.abs(b).max() or 1.0
            np.testing.assert_allclose(
                a, b, rtol=0, atol=tolerance * largest, err_msg=kind
            )
    return weights, found
