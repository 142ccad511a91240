import pytest
from keras import layers

from keras_tp.distribution.planning import rules


class Scale(layers.Layer):
    pass


class Inherits(Scale):
    pass


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr(rules, "_RULES", dict(rules._RULES))


def test_a_rule_is_for_its_class_only():
    @rules.register_rule(Scale)
    def scale(dims, step):
        pass

    assert rules._RULES[True, Scale] is scale
    assert (True, Inherits) not in rules._RULES


@pytest.mark.parametrize("wrong", ["Scale", int, Scale()])
def test_rules_are_for_layers_and_operations(wrong):
    with pytest.raises(ValueError, match="takes a subclass of `keras.Layer`"):
        rules.register_rule(wrong)
