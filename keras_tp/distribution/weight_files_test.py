import warnings

import keras
import numpy as np
import pytest
from keras import layers

from integration_tests import harness
from keras_tp import distribution as dist
from keras_tp.distribution import weight_files


def build(dtype="float32", units=4):
    return keras.Sequential(
        [keras.Input((3,)), layers.Dense(units, dtype=dtype, name="d")]
    )


@pytest.fixture
def scope():
    mesh = harness.mesh(harness.fitted((1, 2)))
    return dist.TensorParallel(mesh).scope()


def saved(tmp_path, **kwargs):
    path = tmp_path / "m.weights.h5"
    build(**kwargs).save_weights(path)
    return path


def test_another_float_dtype_is_converted_with_one_warning(tmp_path, scope):
    with scope:
        model = build()
        path = saved(tmp_path, dtype="float16")
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            model.load_weights(path)
    (one,) = [str(w.message) for w in said if "another dtype" in str(w.message)]
    assert one.startswith("2 variables") and "saved as float16" in one
    assert model.layers[0].kernel.dtype == "float32"


def with_nan(tmp_path):
    model = build()
    kernel, bias = model.get_weights()
    kernel[1, 2] = np.nan
    model.set_weights([kernel, bias])
    path = tmp_path / "nan.weights.h5"
    model.save_weights(path)
    return path


def test_nan_is_loaded_with_a_warning(tmp_path, scope):
    with scope:
        model, path = build(), with_nan(tmp_path)
        with pytest.warns(UserWarning, match="/kernel': 1 of its numbers"):
            model.load_weights(path)
        assert np.isnan(model.get_weights()[0]).sum() == 1


@pytest.mark.parametrize("kind", ["nan", "dtype"])
@pytest.mark.parametrize("is_map", [False, True])
def test_a_strict_distribution_refuses(is_map, kind, tmp_path):
    mesh = harness.mesh(harness.fitted((1, 2)))
    if is_map:
        layout_map = dist.LayoutMap(mesh)
        layout_map.strict = True
        layout_map[".*kernel"] = (None, "model")
        distribution = dist.ModelParallel(layout_map=layout_map)
    else:
        distribution = dist.TensorParallel(mesh, strict=True)
    with distribution.scope():
        model = build()
        before = model.get_weights()
        path = {"nan": with_nan, "dtype": saved_as_float16}[kind](tmp_path)
        with pytest.raises(ValueError, match=f"{path.name}.*is unchanged"):
            model.load_weights(path)
        for old, new in zip(before, model.get_weights()):
            np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize("is_strict", [False, True])
def test_a_model_with_nan(is_strict, tmp_path):
    path = tmp_path / "nan.keras"
    mesh = harness.mesh(harness.fitted((1, 2)))
    with dist.TensorParallel(mesh, strict=is_strict).scope():
        model = build()
        kernel, bias = model.get_weights()
        kernel[1, 2] = np.nan
        model.set_weights([kernel, bias])
        model.save(path)
        if is_strict:
            with pytest.raises(ValueError, match="NaN.*No model was made"):
                keras.saving.load_model(path)
            return
        with pytest.warns(UserWarning, match="1 variables have NaN.*nan.keras"):
            loaded = keras.saving.load_model(path)
        assert np.isnan(loaded.get_weights()[0]).sum() == 1


def saved_as_float16(tmp_path):
    return saved(tmp_path, dtype="float16")


def test_a_file_of_other_shapes_leaves_the_model_unchanged(tmp_path, scope):
    with scope:
        model = build()
        path = saved(tmp_path, units=6)
        before = [np.array(w) for w in model.get_weights()]
        with pytest.raises(ValueError, match="m.weights.h5'.*is unchanged"):
            model.load_weights(path)
        for old, new in zip(before, model.get_weights()):
            np.testing.assert_array_equal(old, new)


def test_a_missing_file_is_not_a_damaged_one(tmp_path, scope):
    with scope:
        with pytest.raises(FileNotFoundError):
            build().load_weights(tmp_path / "none.weights.h5")


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [("float16", "float"), ("bfloat16", "float"), ("int32", "int")],
)
def test_kinds_of_dtypes(dtype, kind):
    assert weight_files._kind(dtype) == kind


def test_samples_are_made_outside_of_the_dry_run():
    seen = []

    def sample(obj_type):
        seen.append(weight_files.get_stateless_scope())

    with weight_files._DryRun(None) as run:
        weight_files.outside_of_the_pass(sample)("Layer")
        assert weight_files.get_stateless_scope() is run
    assert seen == [None]
