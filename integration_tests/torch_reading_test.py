"""Numbers that Python reads from split tensors, and what it branches on."""

import keras
import numpy as np
import pytest

if keras.config.backend() != "torch":
    pytest.skip("tensors of torch", allow_module_level=True)

import torch
import torch.nn.functional as F

from integration_tests import torch_ops_test
from integration_tests.torch_ops_test import M
from integration_tests.torch_ops_test import check
from integration_tests.torch_ops_test import randn
from keras_tp import distribution

mesh = torch_ops_test.mesh

# No two processes have the same sum, greatest value or count.
VALUES = torch.arange(48.0).reshape(4, 12) ** 2 / 7


def placed(value, axes, mesh):
    return distribution.distribute_tensor(
        value.clone(), distribution.TensorLayout(axes, mesh)
    )


READS = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x.mean()),
    "int": lambda x: int((x > 90).sum()),
    "bool": lambda x: bool((x > 200).sum() > 5),
    "if": lambda x: "yes" if x.sum() > 3000 else "no",
    "not": lambda x: not (x > 310).sum(),
    "range": lambda x: len(range(int((x > 90).sum()))),
    "index": lambda x: list(range(99))[(x > 90).sum()],
    "complex": lambda x: complex(x.sum()),
    "compare": lambda x: bool(x.sum() > 4000.0 and x.amax() < 400.0),
    "max": lambda x: float(keras.ops.max(x)),
    "amin": lambda x: x.amin().item(),
    "norm": lambda x: round(x.norm().item(), 2),
    "prod": lambda x: (x / 200 + 1).prod().item() > 1,
    "detach": lambda x: x.sum().detach().cpu().item(),
    "tolist": lambda x: x.tolist(),
    "tolist of a sum": lambda x: x.sum(1).tolist(),
    "iterate": lambda x: [float(row) for row in x.sum(1)],
    "format": lambda x: f"{x.sum():.1f} of {x.mean():>9.2f}",
    "in": lambda x: 3.0**2 / 7 in x,
    "equal": lambda x: torch.equal(x, VALUES),
    "allclose": lambda x: torch.allclose(x, VALUES + (VALUES > 300)),
    "nonzero": lambda x: len(torch.nonzero(x > 90)),
    "where": lambda x: len(torch.where(x > 90)[0]),
    "mask": lambda x: x[x > 90].shape,
    "array": lambda x: np.asarray(x.sum(1)).tolist(),
    "numpy": lambda x: x.sum(1).numpy().tolist(),
    "no dims": lambda x: x.sum(dim=[], keepdim=True).tolist(),
}


@pytest.mark.parametrize("axes", [(M, None), (None, M)])
@pytest.mark.parametrize("name", READS)
def test_a_number_is_that_of_the_whole_tensor(name, axes, mesh):
    read = READS[name]
    got, expected = read(placed(VALUES, axes, mesh)), read(VALUES)
    assert type(got) is type(expected)
    if isinstance(expected, (float, list, complex)):
        np.testing.assert_allclose(got, expected, rtol=1e-5)
    else:
        assert got == expected


def test_a_branch_is_the_same_in_every_process(mesh):
    """A loss that is scaled by a count, as in a custom metric."""
    x = placed(VALUES, (None, M), mesh)
    count = int(keras.ops.sum(x > 90))
    loss = keras.ops.sum(x) * count
    np.testing.assert_allclose(float(loss), float(VALUES.sum()) * count)
    assert count == int((VALUES > 90).sum())


def test_the_text_of_a_split_tensor_has_no_part_of_its_values(mesh):
    x = placed(VALUES, (None, M), mesh)
    for value in (x, x.sum(), x.amax(0)):
        text = repr(value) + str(value) + f"{value}"
        assert "local_tensor" not in text
    assert "shape=(4, 12)" in repr(x) and "convert_to_numpy" in repr(x)
    # What is whole is shown.
    assert "4" in repr(placed(torch.tensor(4.0), (), mesh))


def test_a_metric_that_reads_numbers(mesh):
    class Greatest(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="greatest")
            self.seen = 0.0

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.seen = max(self.seen, float(keras.ops.max(y_pred)))

        def result(self):
            return self.seen

    y = np.arange(8, dtype="float32").reshape(8, 1)

    def greatest():
        inputs = keras.Input((1,))
        model = keras.Model(inputs, keras.layers.Identity()(inputs))
        model.compile("sgd", "mse", metrics=[Greatest()])
        return model.evaluate(y, y, batch_size=8, return_dict=True, verbose=0)

    count = len(distribution.list_devices())
    batches = distribution.DeviceMesh(
        (count, 1), ["batch", M], distribution.list_devices()
    )
    parallel = distribution.ModelParallel(
        layout_map=distribution.LayoutMap(batches)
    )
    with parallel.scope():
        assert greatest()["greatest"] == 7.0


ALIKE = torch.tensor([[1.0, 3.0, 0.0, 3.0], [2.0, 3.0, 0.0, 1.0]])


def into_plain(x):
    total = torch.zeros(())
    total += x.sum()
    scaled = torch.ones(x.shape)
    scaled *= x
    scaled[:, 1:3] = x[:, :2]
    return scaled + total


OPERATIONS = {
    "amax": (torch.amax, randn(4, 8)),
    "amin": (torch.amin, randn(4, 8)),
    "amax of equal values": (torch.amax, ALIKE.repeat(2, 2)),
    "amin of equal values": (torch.amin, ALIKE.repeat(2, 2)),
    "nanmax": (keras.ops.nanmax, randn(4, 8)),
    "nanmin": (keras.ops.nanmin, randn(4, 8)),
    "prod over two dims": (lambda x: keras.ops.prod(x, (0, 1)), randn(4, 8)),
    "median": (lambda x: keras.ops.median(x, axis=1), randn(4, 8)),
    "quantile": (lambda x: keras.ops.quantile(x, 0.3, axis=1), randn(4, 8)),
    "norm": (lambda x: keras.ops.norm(x, ord=1), randn(4, 8)),
    "stft": (lambda x: keras.ops.stft(x, 8, 4, 8)[0], randn(4, 32)),
    "extract_sequences": (
        lambda x: keras.ops.extract_sequences(x, 4, 2),
        randn(4, 32),
    ),
    "associative_scan": (
        lambda x: keras.ops.associative_scan(torch.mul, x, axis=1),
        randn(4, 8),
    ),
    "lstsq": (
        lambda x: keras.ops.lstsq(x, torch.ones(4, 1)),
        randn(4, 4) + 3 * torch.eye(4),
    ),
    "ctc_loss": (
        lambda x: keras.ops.ctc_loss(
            torch.tensor([[1, 2]] * 4),
            x,
            torch.tensor([2] * 4),
            torch.tensor([6] * 4),
        ),
        randn(4, 6, 4),
    ),
    "l1 and l2": (keras.regularizers.L1L2(0.1, 0.2), randn(4, 8)),
    "into plain tensors": (into_plain, randn(4, 8)),
    "rms_norm": (lambda x: F.rms_norm(x, (8,)), randn(4, 8)),
    "RMSNormalization": (
        lambda x: keras.ops.rms_normalization(x),
        randn(4, 8),
    ),
    "Circle": (
        lambda x: keras.losses.Circle()(
            torch.tensor([0, 1, 0, 1]), x, sample_weight=torch.ones(4)
        ),
        randn(4, 8),
    ),
    **{
        name: (getattr(keras.ops, name), 3 * randn(4, 8))
        for name in (
            "hard_shrink",
            "hard_sigmoid",
            "hard_silu",
            "hard_tanh",
            "log_sigmoid",
            "relu6",
            "soft_shrink",
        )
    },
}


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_and_gradients(name, dim, mesh):
    function, value = OPERATIONS[name]
    axes = [None] * value.ndim
    axes[dim] = M
    check(function, [value], [tuple(axes)], mesh)


@pytest.mark.parametrize("axes", [(M, None), (None, M), (None, None)])
@pytest.mark.parametrize("outside", [-1, 24, 10**6])
def test_an_id_outside_of_its_table(outside, axes, mesh):
    table = placed(randn(24, 8), axes, mesh)
    ids = torch.tensor([[3, 23], [0, outside]])
    with pytest.raises(IndexError, match="out of range|24 rows.*Received"):
        F.embedding(ids, table)


def test_the_error_of_an_id_names_the_layer(mesh):
    layout_map = distribution.LayoutMap(mesh)
    layout_map["words/embeddings"] = (M, None)
    with distribution.ModelParallel(layout_map=layout_map).scope():
        layer = keras.layers.Embedding(24, 8, name="words")
        layer(np.array([[1, 23]]))
        with pytest.raises(IndexError, match="words has 24 rows.* 24"):
            layer(np.array([[1, 24]]))
