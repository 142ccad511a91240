"""Every function of Keras that takes tensors, with inputs split in every way.

A function is right within rounding, with its gradient; or it is computed whole
or refused, and then stands in `ops_listed`. CI tries a slice of them,
`KERAS_TP_SLOW=1` all.
"""

import json
import os
import zlib

import keras
import pytest

from integration_tests import harness
from integration_tests import ops_cases
from integration_tests import ops_inputs
from integration_tests import ops_listed
from integration_tests import ops_runner
from keras_tp import distribution

BACKEND = keras.config.backend()
SLOW = os.environ.get("KERAS_TP_SLOW") == "1"
# One of so many functions is tried in CI.
STRIDE = {"jax": 48, "tensorflow": 32, "torch": 6}[BACKEND]
# Tried in CI always.
ALWAYS = ("sum",)


def _without_tensors():
    return {name for names in ops_inputs.NO_TENSORS.values() for name in names}


FUNCTIONS = sorted(set(ops_cases.public_functions()) - _without_tensors())


def is_in_slice(name):
    """Returns whether CI tries a function; the slice is the same everywhere."""
    return SLOW or name in ALWAYS or zlib.crc32(name.encode()) % STRIDE == 0


def outcomes_of(name, cases):
    """Returns a dict of case and split to how it ends."""
    mesh = harness.mesh((1, 2))
    found = {}
    known = [ops_runner.reference(case) for case in cases]
    for case, reference in zip(cases, known):
        if reference is None:
            found[case.name, None] = "not there", ""
            continue
        if ops_listed.reason(ops_listed.DRAWN, BACKEND, name) is not None:
            reference = _on_whole_inputs(reference, mesh)
        for dims in ops_cases.splits_of(case.inputs):
            axes = ops_cases.axes_of(case.inputs, dims)
            layout_map = distribution.LayoutMap(mesh)
            with distribution.ModelParallel(layout_map=layout_map).scope():
                outcome = ops_runner.outcome(reference, axes, mesh)
            found[case.name, dims] = outcome
    _note(name, found)
    return found


def _on_whole_inputs(reference, mesh):
    """Returns a reference of the same mesh, on which nothing is split."""
    case = reference.case
    layout_map = distribution.LayoutMap(mesh)
    with distribution.ModelParallel(layout_map=layout_map).scope():
        axes = [(None,) * x.ndim for x in case.inputs]
        found = ops_runner.on_mesh(case, axes, mesh, reference.gradients)
    return reference._replace(found=found)


def _note(name, found):
    """Writes how cases end to where `ops_table.py` reads it, if asked to."""
    folder = os.environ.get("KERAS_TP_OPS_FOLDER")
    if folder is None or os.environ.get("RANK", "0") != "0":
        return
    with open(os.path.join(folder, f"{BACKEND}.jsonl"), "a") as file:
        for (case, dims), (outcome, text) in found.items():
            file.write(json.dumps([name, case, dims, outcome, text]) + "\n")


def check(name, found):
    """Compares how the cases of a function end with the lists."""
    wrong = [
        f"{case} split along {dims}: {text}"
        for (case, dims), (outcome, text) in found.items()
        if outcome == "wrong"
    ]
    assert not wrong, "\n\n".join(wrong)
    outcomes = {outcome for outcome, _ in found.values()}
    for outcome, table in {
        "whole": ops_listed.WHOLE,
        "refused": ops_listed.REFUSED,
        "not there": ops_listed.NOT_THERE,
    }.items():
        if outcome == "whole" and BACKEND == "jax":
            # XLA decides, for each program.
            continue
        is_listed = ops_listed.reason(table, BACKEND, name) is not None
        assert is_listed == (outcome in outcomes), (
            f"{name} is {outcome} on {BACKEND}: {outcome in outcomes}. It is "
            f"listed so: {is_listed}. Change `ops_listed`. Found: {found}"
        )


@pytest.mark.parametrize("name", filter(is_in_slice, FUNCTIONS))
def test_a_function_with_split_inputs(name):
    cases = ops_cases.cases_of(name)
    assert cases is not None, (
        f"{name} has no place: give it inputs in `ops_cases.INPUTS`, or list "
        "it in `ops_inputs.NO_TENSORS`."
    )
    check(name, outcomes_of(name, cases))


@pytest.mark.parametrize("name", filter(is_in_slice, FUNCTIONS))
def test_a_function_on_a_mesh_of_two_axes(name):
    """Partitioners add up parts that the other axis repeats, if they err."""
    if distribution.get_device_count() < 4:
        pytest.skip("needs 4 devices")
    if ops_listed.reason(ops_listed.DRAWN, BACKEND, name) is not None:
        pytest.skip("its numbers depend on the mesh")
    mesh = harness.mesh((2, 2))
    wrong = []
    for case in ops_cases.cases_of(name):
        reference = ops_runner.reference(case)
        if reference is None:
            continue
        for axes in ops_cases.splits_over_two_axes(case.inputs):
            layout_map = distribution.LayoutMap(mesh)
            with distribution.ModelParallel(layout_map=layout_map).scope():
                outcome, text = ops_runner.outcome(reference, axes, mesh)
            if outcome == "wrong":
                wrong.append(f"{case.name} split along {axes}: {text}")
    assert not wrong, "\n\n".join(wrong)


def test_every_public_function_has_a_place():
    functions = ops_cases.public_functions()
    assert len(functions) > 300
    placed = set(ops_cases.INPUTS) | _without_tensors()
    assert not placed - set(functions), "Keras has these no more"
    assert not [name for name in FUNCTIONS if ops_cases.cases_of(name) is None]


def test_what_differs_is_found():
    """The comparison itself: a number, a gradient, a dtype, a shape."""
    case = ops_cases.cases_of("sin")[0]
    found = ops_runner.reference(case).found
    assert not ops_runner.differences(found, found)
    for changed in (
        found._replace(outputs=[found.outputs[0] + 1e-3]),
        found._replace(gradients=[found.gradients[0] * 2]),
        found._replace(gradients=[None]),
        found._replace(outputs=[found.outputs[0].astype("float64")]),
        found._replace(outputs=[found.outputs[0][:2]]),
        found._replace(outputs=found.outputs * 2),
    ):
        assert ops_runner.differences(changed, found)
