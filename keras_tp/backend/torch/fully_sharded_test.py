"""Kernels that a product gathers over the axis of the batch."""

import os

import keras
import numpy as np
import pytest

from keras_tp import distribution
from keras_tp.distribution.tensor_layout import TensorLayout

if keras.config.backend() != "torch":
    pytest.skip("for torch", allow_module_level=True)
if "RANK" not in os.environ:
    pytest.skip("needs several processes", allow_module_level=True)

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

RNG = np.random.default_rng(0)
X = RNG.normal(size=(4, 6, 8)).astype("float32")
KERNEL = RNG.normal(size=(8, 12)).astype("float32")
IDS = RNG.integers(0, 8, (4, 6))


def scope(names):
    """Returns a mesh of all devices, half of them or all along the first."""
    devices = distribution.list_devices()
    shape = (len(devices),)
    if len(names) > 1:
        if len(devices) < 4:
            pytest.skip("a mesh of two axes needs 4 devices")
        shape = (2, len(devices) // 2)
    mesh = distribution.DeviceMesh(shape, list(names), devices)
    layout_map = distribution.LayoutMap(mesh)
    return mesh, distribution.ModelParallel(layout_map=layout_map)


def numbers(counted):
    return {str(k).split(".")[-1]: n for k, n in counted.items() if n}


def run(function, data, names, axes, value=KERNEL):
    """Returns a result, a gradient, and the collectives of both passes."""
    mesh, parallel = scope(names)
    with parallel.scope():
        variable = keras.Variable(value, layout=TensorLayout(axes, mesh))
        layout = parallel.get_data_layout(data.shape)
        x = distribution.distribute_tensor(torch.tensor(data), layout)
        with CommDebugMode() as forward:
            result = function(x, variable.value)
        with CommDebugMode() as backward:
            (result**2).sum().backward()
        gradient = variable.value.grad
        assert gradient.placements == variable.value.placements
        found = result.full_tensor().detach(), gradient.full_tensor()
    forward, backward = (m.get_comm_counts() for m in (forward, backward))
    return (*found, numbers(forward), numbers(backward))


def expected(function, data, value=KERNEL):
    kernel = torch.tensor(value, requires_grad=True)
    result = function(torch.tensor(data), kernel)
    (result**2).sum().backward()
    return result.detach(), kernel.grad


PRODUCTS = {
    "matmul": lambda x, kernel: torch.matmul(x, kernel),
    "einsum": lambda x, kernel: torch.einsum("abc,cd->abd", x, kernel),
}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize(
    "names,axes",
    [
        (["batch"], ("batch", None)),
        (["data"], (None, "data")),
        (["batch", "model"], ("batch", "model")),
        (["batch", "model"], ("model", "batch")),
    ],
)
def test_a_product_gathers_its_kernel(name, names, axes):
    function = PRODUCTS[name]
    result, gradient, forward, backward = run(function, X, names, axes)
    want = expected(function, X)
    np.testing.assert_allclose(result, want[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(gradient, want[1], rtol=1e-4, atol=1e-4)
    assert forward.pop("all_gather_into_tensor") == 1
    assert "all_gather_into_tensor" not in forward
    # The input needs no gradient here.
    assert backward["reduce_scatter_tensor"] == 1


def test_a_lookup_gathers_its_table():
    def function(ids, table):
        return torch.nn.functional.embedding(ids, table)

    args = function, IDS, ["batch"], ("batch", None)
    result, gradient, forward, backward = run(*args)
    want = expected(function, IDS)
    np.testing.assert_allclose(result, want[0], rtol=1e-5)
    np.testing.assert_allclose(gradient, want[1], rtol=1e-4)
    assert forward == {"all_gather_into_tensor": 1}
    assert backward["reduce_scatter_tensor"] == 1


def test_a_dim_that_two_axes_split_is_reshaped():
    mesh, parallel = scope(["batch", "model"])
    value = np.arange(8 * 3, dtype="float32").reshape(8, 3)
    with parallel.scope():
        layout = TensorLayout((("batch", "model"), None), mesh)
        variable = keras.Variable(value, layout=layout)
        # The first dim has a part for each device of one axis alone.
        result = keras.ops.reshape(variable * 1.0, (2, 4, 3))
        (result**2).sum().backward()
        found = result.full_tensor().detach()
        gradient = variable.value.grad.full_tensor()
    np.testing.assert_array_equal(found, value.reshape(2, 4, 3))
    np.testing.assert_array_equal(gradient, 2 * value)


def test_tensors_of_torch_on_a_mesh_without_names():
    """As in a module of `parallelize_module`, beside a distributed model."""
    count = len(distribution.list_devices())
    mesh = init_device_mesh("cpu", (count,))
    rng = np.random.default_rng(0)
    x = torch.tensor(rng.normal(size=(2, 3, 4 * count)), requires_grad=True)
    up, down = torch.tensor(rng.normal(size=(2, 4 * count, 4 * count)))

    def loss(x, up, down):
        return (torch.matmul(torch.einsum("abc,cd->abd", x, up), down)).sum()

    loss(x, up, down).backward()
    with distribution.DataParallel().scope():
        split = distribute_tensor(x.detach(), mesh).requires_grad_()
        loss(
            split,
            distribute_tensor(up, mesh, [Shard(1)]),
            distribute_tensor(down, mesh, [Shard(0)]),
        ).backward()
    found = split.grad.full_tensor()
    torch.testing.assert_close(found, x.grad)
