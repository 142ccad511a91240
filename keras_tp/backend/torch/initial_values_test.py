import keras
import pytest

if keras.config.backend() != "torch":
    pytest.skip("the torch backend", allow_module_level=True)

import torch
from keras.src.backend.torch import random
from torch.utils._python_dispatch import TorchDispatchMode

from keras_tp import distribution
from keras_tp.backend.torch import initial_values

DRAWS = {
    "uniform": lambda shape: random.uniform(shape, -0.3, 0.7, seed=5),
    "truncated_normal": lambda shape: random.truncated_normal(
        shape, 0.5, 0.02, seed=5
    ),
}


@pytest.mark.parametrize("shape", [(64,), (5, 13), (2, 3, 11), (257,), (100,)])
@pytest.mark.parametrize("name", DRAWS)
def test_the_numbers_are_those_of_keras(name, shape, monkeypatch):
    monkeypatch.setattr(initial_values, "PART", 16)
    expected = DRAWS[name](shape)
    with distribution.DataParallel(devices=["cpu:0"]).scope():
        actual = DRAWS[name](shape)
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    assert torch.equal(actual, expected)
    assert len(expected.unique()) > 1


class LargeTensors(TorchDispatchMode):
    """Keeps one tensor of each memory of some size that is made."""

    def __init__(self, size):
        super().__init__()
        self.size = size
        self.made = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in keras.tree.flatten(result):
            if isinstance(tensor, torch.Tensor) and tensor.numel() >= self.size:
                self.made.setdefault(tensor.untyped_storage()._cdata, tensor)
        return result


@pytest.mark.parametrize("name", DRAWS)
def test_only_the_result_is_as_large(name, monkeypatch):
    monkeypatch.setattr(initial_values, "PART", 16)
    with distribution.DataParallel(devices=["cpu:0"]).scope():
        with LargeTensors(257) as large:
            DRAWS[name]((257,))
    assert len(large.made) == 1
