import keras
import pytest

if keras.config.backend() != "torch":
    pytest.skip("the torch backend", allow_module_level=True)

import numpy as np
import torch
from torch.distributed.tensor import DTensor

import keras_tp
from keras_tp import distribution
from keras_tp.backend.torch import distribution_lib
from keras_tp.backend.torch import placement
from keras_tp.backend.torch import processes
from keras_tp.backend.torch.ops import table


@pytest.fixture(autouse=True)
def reset():
    yield
    distribution.set_distribution(None)
    keras_tp.uninstall()
    keras.utils.clear_session()


def test_one_device_without_a_launcher():
    assert distribution_lib.list_devices() == ["cpu:0"]
    assert distribution_lib.list_devices("CPU") == ["cpu:0"]
    assert distribution_lib.get_device_count() == 1
    assert distribution_lib.num_processes() == 1
    assert distribution_lib.process_id() == 0


@pytest.mark.parametrize("kind", ["tpu", "quantum"])
def test_a_device_type_that_is_not_there(kind):
    with pytest.raises(ValueError, match=f"device_type='{kind}'"):
        distribution_lib.list_devices(kind)


def test_a_device_of_another_process_needs_a_launcher():
    with pytest.raises(ValueError, match="keras_tp.launch --devices 3"):
        distribution_lib._to_backend_device("cpu:2")
    assert distribution_lib._to_backend_device("cpu:0") == torch.device("cpu")


def test_a_mesh_larger_than_the_run_needs_a_launcher():
    with pytest.raises(ValueError, match="keras_tp.launch --devices 2"):
        distribution.DeviceMesh((1, 2), ["batch", "model"])
    mesh = keras.distribution.DeviceMesh((2,), ["model"], ["cpu:0", "cpu:1"])
    with pytest.raises(ValueError, match="torchrun --nproc-per-node 2"):
        placement.to_torch_mesh(mesh)


def test_one_device_is_plain_torch():
    mesh = distribution.DeviceMesh((1, 1), ["batch", "model"])
    layout = distribution.TensorLayout((None, "model"), mesh)
    assert distribution_lib._to_backend_layout(layout).mesh is None
    x = torch.ones(2, 3)
    assert distribution_lib.distribute_tensor(x, layout) is x
    variable = keras.Variable(np.ones((2, 3), "float32"))
    assert distribution_lib.variable_axes(variable) is None
    distribution_lib.relayout_variable(variable, layout)
    assert distribution_lib.variable_axes(variable) == (None, "model")
    assert distribution_lib.variable_bytes_by_device(variable) == {"cpu:0": 24}
    distribution_lib.relayout_variable(variable, None)
    assert distribution_lib.variable_axes(variable) is None
    np.testing.assert_array_equal(variable.numpy(), np.ones((2, 3)))


def hooked():
    """The owner and the name of each attribute that the table replaces."""
    return [
        (hook.resolve(), attribute)
        for hook in distribution_lib.hook_table()
        for attribute in hook.attributes
    ]


def test_installing_is_undone():
    before = [getattr(*place) for place in hooked()]
    keras_tp.install()
    for place, original in zip(hooked(), before):
        assert getattr(*place) is not original, place
    keras_tp.uninstall()
    for place, original in zip(hooked(), before):
        now = getattr(*place)
        assert now is original or now == original, place
    assert not DTensor._op_dispatcher._allow_implicit_replication


def test_operations_of_the_handlers_exist():
    handlers = table.with_handlers({})
    assert len(handlers) > 90
    assert all(isinstance(op, torch._ops.OpOverload) for op in handlers)


def test_agreeing_alone_changes_nothing():
    processes.start()
    torch.manual_seed(3)
    before = processes.random_state()["cpu"].tobytes()
    processes.agree_on_seed()
    processes.meet("a test")
    processes.same_everywhere("things", [1, 2], "")
    assert processes.random_state()["cpu"].tobytes() == before
    assert processes.gather("x", "a test") == ["x"]
