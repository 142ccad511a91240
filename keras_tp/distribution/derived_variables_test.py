import types
import warnings

import pytest
from keras import layers

from integration_tests import harness
from keras_tp import distribution as dist
from keras_tp.distribution import derived_variables
from keras_tp.distribution.variable_origin import origin_of


@pytest.fixture
def scope():
    mesh = harness.mesh(harness.fitted((1, 2)))
    layout_map = dist.LayoutMap(mesh)
    layout_map["column/kernel"] = (None, "model")
    layout_map["row/kernel"] = ("model", None)
    layout_map["table/embeddings"] = (None, "model")
    return dist.ModelParallel(layout_map=layout_map).scope()


def dense(name, units=6, inputs=4):
    layer = layers.Dense(units, name=name)
    layer.build((None, inputs))
    return layer


def axes(*variables):
    return [tuple(variable._layout.axes) for variable in variables]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("column", [(None, None), (None, "model")]),
        ("row", [("model", None), (None, None)]),
    ],
)
def test_lora_follows_the_dims_of_the_kernel(scope, name, expected):
    with scope:
        layer = dense(name)
    # After the scope, too.
    layer.enable_lora(2)
    assert axes(layer.lora_kernel_a, layer.lora_kernel_b) == expected
    assert origin_of(layer.lora_kernel_a).follows
    assert layer._changes == 2
    rows = {v.name: dims for v, dims, _ in derived_variables.derived_of(layer)}
    assert rows == {"lora_kernel_a": [0, None], "lora_kernel_b": [None, 1]}


def test_quantized_kernels_and_scales_keep_the_split(scope):
    with scope:
        layer = layers.Dense(6, use_bias=False, name="column")
        layer.build((None, 4))
    own = origin_of(layer.kernel).distribution
    # Without a bias no variable is left while the kernel is replaced.
    layer.quantize("int8")
    assert axes(layer._kernel, layer.kernel_scale) == [
        (None, "model"),
        ("model",),
    ]
    assert origin_of(layer._kernel).distribution is own


def test_a_layer_of_another_kind_adds_variables_of_its_own(scope):
    class Scaled(layers.Layer):
        def build(self, input_shape):
            self._kernel = self.add_weight(shape=(4, 6), name="kernel")
            self.scale = self.add_weight(shape=(6,), name="kernel_scale")

    with scope:
        layer = Scaled(name="column")
        layer.build(None)
    assert axes(layer._kernel, layer.scale) == [(None, "model"), (None,)]


def test_what_cannot_follow_is_whole_and_said():
    mesh = dist.DeviceMesh((3,), ["model"], ["cpu:0", "cpu:1", "cpu:2"])
    source = derived_variables._Source(
        "d/kernel", (6, 6), dist.TensorLayout((None, "model"), mesh)
    )
    follow = derived_variables._follow
    assert follow(source, [0, 1], (6, 3)) == ([None, "model"], [])
    found, (why,) = follow(source, [0, 1], (6, 4))
    assert found == [None, None] and "does not divide by 3" in why
    assert follow(source, "why not", (6,)) == ([None], ["why not"])


def test_modes_and_variables_that_are_not_known():
    layer = types.SimpleNamespace(
        _kernel=types.SimpleNamespace(shape=(4, 6)), _embeddings=None
    )

    def dims(name, mode=None, shape=(6,)):
        kernel, found = derived_variables._dims_of_follower(
            layer, mode, name, shape
        )
        return found if kernel is layer._kernel else None

    assert dims("kernel_scale") == [1]
    assert dims("kernel_zero", shape=(2, 6)) == [None, 1]
    assert dims("g_idx") == [0]
    assert dims("embeddings_scale") is None
    assert dims("kernel") is None and dims("inputs_scale") is None
    assert "mode 'gptq' are not known" in dims("kernel_scale", "gptq")


def test_nothing_is_said_where_no_kernel_is_split(scope):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with scope:
            layer = dense("whole", units=5, inputs=3)
            layer.enable_lora(1)
    assert axes(layer.lora_kernel_a) == [(None, None)]
