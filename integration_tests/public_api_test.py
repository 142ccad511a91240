"""Public names and signatures are those that were promised."""

import importlib
import inspect
import subprocess
import sys

import keras
import pytest

import keras_tp
from keras_tp import distribution as dist

# What keras_tp.distribution adds to keras.distribution.
ADDED = {
    "compile_for": (
        "(model_or_build_fn, distribution, target, count=None, *, batch_size, "
        "sequence_length=None, optimizer='adam', loss=None, input_spec=None, "
        "target_spec=None, depth=None, compiled_depths=(2, 4))"
    ),
    "count_collectives": "(model, x, y=None)",
    "describe": "(model, slots=False)",
    "distribute_model": "(model, distribution=None)",
    "plan_sharding": (
        "(model_or_build_fn, device_mesh, input_spec=None, overrides=None, "
        "sequence_parallel=False, fully_shard=False, gather_outputs=16777216)"
    ),
    "register_rule": "(cls)",
    "ShardingPlan": (
        "(model_name, device_mesh, axis, variables, reductions, activations, "
        "split_outputs, without_rule, gathers=())"
    ),
    "consolidate": "(path, filepath)",
    "load_checkpoint": "(path, model)",
    "save_checkpoint": "(path, model, wait=True)",
    "TensorParallel": (
        "(device_mesh=None, batch_dim_name=None, plan=None, overrides=None, "
        "strict=False, auto_shard_dataset=True, sequence_parallel=False, "
        "fully_shard=False)"
    ),
    "verify": (
        "(build_fn, distribution, x, y, steps=5, batch_size=None, seed=0, "
        "rtol=1e-05)"
    ),
    "visualize": "(variable)",
}
KERAS_NAMES = [
    "DataParallel",
    "DeviceMesh",
    "LayoutMap",
    "ModelParallel",
    "TensorLayout",
    "distribute_tensor",
    "distribution",
    "get_device_count",
    "initialize",
    "list_devices",
    "set_distribution",
]


def public(module):
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }


def test_the_names_are_keras_and_those_added():
    assert public(keras.distribution) == set(KERAS_NAMES)
    # A submodule of the same name must not hide a function.
    assert public(dist) == set(KERAS_NAMES) | set(ADDED)
    assert public(keras_tp) == {
        "TensorParallelKeras",
        "install",
        "uninstall",
    }
    assert keras_tp.__version__


@pytest.mark.parametrize("name", KERAS_NAMES)
def test_keras_signatures(name):
    ours, plain = getattr(dist, name), getattr(keras.distribution, name)
    assert inspect.signature(ours) == inspect.signature(plain)
    if inspect.isclass(plain):
        assert issubclass(ours, plain)
        for attribute, value in inspect.getmembers(plain, inspect.isfunction):
            if not attribute.startswith("_"):
                assert inspect.signature(
                    getattr(ours, attribute)
                ) == inspect.signature(value), attribute
    else:
        assert callable(ours)


@pytest.mark.parametrize("name", ADDED)
def test_added_signatures(name):
    assert str(inspect.signature(getattr(dist, name))) == ADDED[name]


@pytest.mark.parametrize("name", ["install", "uninstall"])
def test_install_takes_nothing(name):
    assert str(inspect.signature(getattr(keras_tp, name))) == "()"


def test_the_wrapper_s_signature():
    assert str(inspect.signature(keras_tp.TensorParallelKeras)) == (
        "(model, world_size=None, device_ids=None, distributed_backend='auto')"
    )


@pytest.mark.parametrize("name", sorted([*KERAS_NAMES, *ADDED]))
def test_every_public_name_has_a_docstring(name):
    doc = inspect.getdoc(getattr(dist, name))
    assert doc.splitlines()[0].endswith(".")


def test_importing_patches_nothing():
    code = (
        "import keras, sys\n"
        "import keras.src.layers.layer as layer\n"
        "from keras.src.backend.common import variables\n"
        "before = (layer.Layer.__call__, variables.Variable.__init__,\n"
        "          keras.Model.fit, keras.distribution.set_distribution)\n"
        "import keras_tp\n"
        "from keras_tp.backend import hooks\n"
        "assert before == (layer.Layer.__call__, variables.Variable.__init__,\n"
        "                  keras.Model.fit,\n"
        "                  keras.distribution.set_distribution)\n"
        "assert not hooks.is_installed()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_launch_is_a_module():
    launch = importlib.import_module("keras_tp.launch")
    assert str(inspect.signature(launch.main)) == "(argv=None)"
