import keras
import pytest

if keras.config.backend() != "torch":
    pytest.skip("for torch", allow_module_level=True)

import torch

from keras_tp.backend.torch.ops import matmul

SIZES = dict(zip("abcdeKN", (2, 3, 4, 5, 6, 7, 8)))
# Of kernels and their gradients, in both orders.
MATRICES = [
    *("abK,KN->abN", "abN,KN->abK", "abK,abN->KN"),
    *("abc,cde->abde", "abde,cde->abc", "abc,abde->cde"),
    *("abcd,cde->abe", "abe,cde->abcd", "abcd,abe->cde"),
    *("KN,abK->abN", "abd,abc->cd", "abK,KN->Nab", "ab,b->a"),
]
OTHERS = ["abK,bKN->abN", "abc,abd->adc", "abc,cbd->ad", "abc,abd->bcd"]


def operands_of(equation, **sizes):
    sizes = {**SIZES, **sizes}
    return [
        torch.randn([sizes[letter] for letter in letters])
        for letters in equation.partition("->")[0].split(",")
    ]


@pytest.mark.parametrize("equation", MATRICES + OTHERS)
def test_a_product_of_shards_is_that_of_einsum(equation):
    is_of_matrices = matmul._as_matrices(equation) is not None
    assert is_of_matrices == (equation in MATRICES)
    x, y = operands_of(equation)
    found = matmul._local_product(equation, x, y)
    torch.testing.assert_close(found, torch.einsum(equation, x, y))


def test_shards_without_elements():
    # Of a dim that has fewer parts than devices.
    for sizes in ({"a": 0}, {"K": 0}, {"N": 0}):
        x, y = operands_of("abK,KN->abN", **sizes)
        found = matmul._local_product("abK,KN->abN", x, y)
        assert found.shape == (*x.shape[:2], y.shape[1])
        assert not found.any()
