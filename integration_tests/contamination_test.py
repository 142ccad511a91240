"""Rows C.1 and C.2: any order of runs in one process, and nothing left over."""

import importlib
import os
import pathlib
import random
import subprocess
import sys

import keras
import numpy as np
import pytest

import keras_tp
from integration_tests import combinations
from integration_tests import launching
from keras_tp import distribution as dist
from keras_tp.backend import hooks

ROOT = pathlib.Path(__file__).parent.parent
# Each of these runs in a process of its own first, and is compared. CI runs the
# others only between them.
COMPARED = ("plain", "pair_2x2", "data_4", "heads_1x4", "there_and_back")
if os.environ.get("KERAS_TP_SLOW") == "1":
    COMPARED = tuple(combinations.COMBINATIONS)


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """The numbers of each combination from a process of its own."""
    folder = tmp_path_factory.mktemp("fresh")
    env = launching.environment(devices=8)
    names = list(COMPARED)
    # Of several processes each starts one, and these join among themselves.
    together = keras.config.backend() == "torch"
    for group in [names] if together else [[name] for name in names]:
        subprocess.run(
            [
                *(sys.executable, "-m", "integration_tests.combinations"),
                *(str(folder), *group),
            ],
            env=env,
            cwd=ROOT,
            check=True,
            capture_output=True,
            timeout=300,
        )
    return {name: dict(np.load(folder / f"{name}.npz")) for name in names}


def orders():
    names = list(combinations.COMBINATIONS)
    shuffled = names[:]
    random.Random(5).shuffle(shuffled)
    return {"forwards": names, "backwards": names[::-1], "shuffled": shuffled}


def attributes():
    """Everything in Keras that an installation replaces."""
    table = (
        dist.distribution_lib.TABLE + keras_tp.distribution.model_hooks.TABLE
    )
    lib = importlib.import_module("keras_tp.backend").distribution_lib
    owners = [
        (hook.resolve(), attribute)
        for hook in table + lib.hook_table()
        if hook.is_due()
        for attribute in hook.attributes
    ]
    return [
        # Some are not there before: a backend's module that lacks them.
        (owner, name, vars(owner).get(name), getattr(owner, name, None))
        for owner, name in owners
    ]


@pytest.mark.parametrize("order", ["forwards", "backwards", "shuffled"])
def test_any_order_gives_the_numbers_of_fresh_processes(fresh, order):
    keras_tp.uninstall()
    before = attributes()
    assert len(before) >= 15
    policy = keras.config.dtype_policy()
    for name in orders()[order]:
        got = combinations.run(name)
        assert dist.distribution() is None, name
        assert keras.config.dtype_policy() == policy, name
        if name in fresh:
            assert got.keys() == fresh[name].keys()
            for key, value in fresh[name].items():
                np.testing.assert_array_equal(got[key], value, f"{name}: {key}")
    assert hooks.is_installed()
    keras_tp.uninstall()
    for owner, name, own, found in before:
        assert vars(owner).get(name) is own, (owner, name)
        assert getattr(owner, name, None) is found, (owner, name)
    # And a plain model is trained as if nothing had been installed.
    got = combinations.run("plain")
    assert not hooks.is_installed()
    for key, value in fresh["plain"].items():
        np.testing.assert_array_equal(got[key], value, key)


def test_the_combinations_differ_so_that_mixing_them_up_would_show(fresh):
    losses = [tuple(numbers["history_loss"]) for numbers in fresh.values()]
    # To rounding, pair_1x2, pair_2x2, output_2x2 and plain train one model
    # alike, and so do the two meshes of the attention; the others differ.
    alike = [{"plain", "pair_1x2", "pair_2x2", "output_2x2"}]
    alike += [{"heads_1x4", "heads_2x2"}]
    differ = len(COMPARED) - sum(
        len(names.intersection(COMPARED)) - 1 for names in alike
    )
    assert len({tuple(np.round(loss, 3)) for loss in losses}) == differ


def test_a_failing_scope_restores_what_was_there_before():
    outer = dist.DataParallel(devices=dist.list_devices()[:2])
    inner = dist.DataParallel(devices=dist.list_devices()[:4])
    with outer.scope():
        with pytest.raises(RuntimeError, match="inside"):
            with inner.scope():
                assert dist.distribution() is inner
                raise RuntimeError("inside")
        assert dist.distribution() is outer
    assert dist.distribution() is None
