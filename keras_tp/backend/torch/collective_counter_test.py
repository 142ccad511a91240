import keras
import pytest

if keras.config.backend() != "torch":
    pytest.skip("the torch backend", allow_module_level=True)

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch._logging._internal import warning_once
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import _collective_utils

from keras_tp.backend.torch import processes
from keras_tp.backend.torch.collective_counter import CollectiveCounter


def counted(function):
    processes.start()
    with CollectiveCounter() as counter:
        function(dist.group.WORLD)
    return {name: tuple(p) for name, p in counter.total.items() if p[0]}


def test_functional_collectives():
    x = torch.ones(4, 3)
    assert counted(lambda g: funcol.all_reduce(x, "sum", g)) == {
        "all_reduce": (1, 48)
    }
    assert counted(lambda g: funcol.all_gather_tensor(x, 0, g)) == {
        "all_gather": (1, 48)
    }
    assert counted(lambda g: funcol.reduce_scatter_tensor(x, "sum", 0, g)) == {
        "reduce_scatter": (1, 48)
    }
    # One for each tensor of a combined operation.
    assert counted(
        lambda g: funcol.all_reduce_coalesced([x, x[0]], "sum", g)
    ) == {"all_reduce": (2, 60)}


def test_collectives_of_c10d():
    x = torch.ones(4, 3)
    assert counted(lambda g: dist.all_reduce(x)) == {"all_reduce": (1, 48)}
    assert counted(lambda g: dist.all_gather([torch.empty(4, 3)], x)) == {
        "all_gather": (1, 48)
    }


def test_a_collective_that_is_not_known_is_an_error():
    with pytest.raises(NotImplementedError, match="broadcast"):
        counted(lambda g: dist.broadcast(torch.ones(2), 0))


def test_other_operations_are_not_counted():
    assert counted(lambda g: torch.ones(3) @ torch.ones(3)) == {}


def test_an_all_to_all_on_cpus_gives_no_warning(caplog):
    """DTensor would say that gloo has none, which changes no result."""
    processes.start()
    mesh = init_device_mesh("cpu", (1,))
    # DTensor says it once in a process.
    warning_once.cache_clear()
    x = torch.ones(4, 3)
    out = _collective_utils.shard_dim_alltoall(x, 0, 1, mesh, 0)
    assert torch.equal(out, x)
    assert warning_once.cache_info().currsize == 1
    assert not caplog.records
