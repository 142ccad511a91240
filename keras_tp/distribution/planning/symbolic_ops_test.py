"""What takes symbolic tensors only while a model is traced."""

import keras
import numpy as np
import pytest
from keras import layers
from keras import ops

from keras_tp import distribution
from keras_tp.distribution.planning import symbolic_ops
from keras_tp.distribution.planning.planner_test import PAIR
from keras_tp.distribution.planning.planner_test import plan_of
from keras_tp.distribution.planning.planner_test import split
from keras_tp.distribution.planning.planner_test import with_layer


class Function(layers.Layer):
    """Calls a function; has no say of its own about the shape of the result."""

    def __init__(self, function, **kwargs):
        super().__init__(**kwargs)
        self.function = function

    def call(self, x):
        return self.function(x)


def unless_empty(x):
    """The predicate is known: a tensor that no input is in."""
    return ops.cond(
        ops.equal(ops.shape(x)[1], 0),
        lambda: ops.zeros_like(x),
        lambda: ops.tanh(x),
    )


def sliced(x):
    """An index that is no tuple: Keras takes none of a symbolic tensor."""
    return ops.concatenate([x[1:], x[:1]], axis=0)


def capitals(x):
    return ops.einsum("Bd,d->Bd", x, ops.ones((16,)))


def stacked_along_its_rank(x):
    """The rank of a tensor is compared, as in `ndim or max(axes) + 1`."""
    both = ops.stack([x, -x], ops.ndim(x) or 1)
    return ops.max(both, axis=-1)


MIDDLES = {
    # It works on its backend's own functions.
    "rescaling": lambda: layers.Rescaling(0.5, name="rescaling"),
    "cond": lambda: Function(unless_empty),
    "slice": lambda: Function(sliced),
    "einsum": lambda: Function(capitals),
    "ndim": lambda: Function(stacked_along_its_rank),
}


@pytest.mark.parametrize("name", MIDDLES)
def test_is_traced_through(name):
    plan = plan_of(lambda: with_layer(MIDDLES[name]())())
    assert plan.without_rule == {}
    assert split(plan) == PAIR


def test_images_are_resized_along_with_their_channels():
    def build():
        inputs = keras.Input((8, 8, 3))
        x = layers.Conv2D(16, 3, name="up")(inputs)
        x = layers.Resizing(4, 4)(x)
        return keras.Model(inputs, layers.Conv2D(5, 1, name="down")(x))

    plan = plan_of(build)
    assert plan.without_rule == {}
    assert split(plan) == {"up/kernel": 3, "up/bias": 0, "down/kernel": 2}


def replaced_now():
    names = [(owner, name) for owner, name, _ in symbolic_ops._REPLACED]
    names += [(keras.KerasTensor, name) for name in symbolic_ops._CONVERSIONS]
    return [vars(owner).get(name) for owner, name in names]


def test_keras_is_as_it_was():
    before = replaced_now()
    with symbolic_ops.replaced():
        inside = replaced_now()
    plan_of(with_layer(layers.Rescaling(0.5)))
    assert replaced_now() == before
    assert all(x is not y for x, y in zip(inside, before) if y is not None)


@pytest.mark.parametrize("short", ["bi,ji", "...i,ji"])
def test_an_einsum_that_does_not_say_what_is_left(short):
    square = np.ones((16, 16), "float32")

    def plan_with(subscripts):
        layer = Function(lambda x: ops.einsum(subscripts, x, square), name="x")
        return plan_of(with_layer(layer))

    plan = plan_with(short)
    assert plan.reductions
    assert plan.to_json() == plan_with("bi,ji->bj").to_json()


def with_nothing(x):
    nothing = ops.reshape(x[:0], (0, 5))
    return ops.concatenate([x, ops.reshape(nothing, (0, 16))], axis=0)


def test_nothing_is_reshaped():
    assert split(plan_of(with_layer(Function(with_nothing)))) == PAIR


class Opaque(layers.Layer):
    """A leaf; what it does depends on values, that its shape does not."""

    def call(self, x, training=None):
        return ops.cond(ops.any(x > 0), lambda: 2 * x, lambda: x)


def test_a_leaf_finds_keras_as_it_is():
    @distribution.register_rule(Opaque)
    def opaque(dims, step):
        dims.elementwise(step.inputs, step.outputs[0])

    plan = plan_of(with_layer(Opaque()))
    assert split(plan) == PAIR


class Untrained(layers.Layer):
    """Takes `training`, and its `compute_output_spec` does not."""

    def call(self, x, training=None):
        return x * ops.convert_to_tensor(2 * x.numpy())

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, x.dtype)


def test_a_leaf_is_not_asked_about_training_that_takes_none():
    plan = plan_of(with_layer(Untrained(name="untrained")))
    assert plan.without_rule == {"Untrained": "untrained"}
    assert set(plan._by_path) == {
        "up/kernel",
        "up/bias",
        "down/kernel",
        "down/bias",
    }
