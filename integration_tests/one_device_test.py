"""Where there is one device: what is said, and what is not."""

import json
import subprocess
import sys

import keras
import numpy as np

from integration_tests import launching
from keras_tp import backend

ONE_DEVICE = """
import json
import warnings

import keras
import numpy as np

import keras_tp
from keras_tp import distribution as dist

x, y = np.ones((8, 6), "float32"), np.ones((8, 4), "float32")


def mlp():
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(12), keras.layers.Dropout(0.2)]
    layers = [keras.Input((6,)), *layers, keras.layers.Dense(4)]
    return keras.Sequential(layers)


def fit(make):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        dist.set_distribution(make())
        model = mlp()
        model.compile("adam", "mse")
        loss = model.fit(x, y, epochs=2, verbose=0).history["loss"]
        dist.set_distribution(None)
    kinds = DeprecationWarning, PendingDeprecationWarning
    found = [w for w in found if not issubclass(w.category, kinds)]
    return loss, [str(w.message) for w in found]


names = ["batch", "model"]
four = dist.DeviceMesh((1, 4), names, [f"cpu:{i}" for i in range(4)])
try:
    dist.set_distribution(dist.plan_sharding(mlp, four).distribution())
except ValueError as e:
    error = str(e)
one = dist.DeviceMesh((1, 1), names, ["cpu:0"])
found = {
    "plain": fit(lambda: None),
    "one": fit(lambda: dist.DataParallel(devices=["cpu:0"])),
    "a mesh of one": fit(lambda: dist.TensorParallel(one)),
    "all": fit(lambda: dist.TensorParallel()),
    "all again": fit(lambda: dist.DataParallel()),
}
print("FOUND", json.dumps([error, found]))
"""


def output_of(code):
    """Runs a script where there is one device, in no launcher."""
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=launching.environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_one_device_is_said_once_unless_it_is_asked_for():
    line = output_of(ONE_DEVICE).split("FOUND ")[1]
    error, found = json.loads(line)
    assert "Unknown device 'cpu:1'" in error and "--devices 4 " in error
    for losses, _ in found.values():
        np.testing.assert_allclose(losses, found["plain"][0], rtol=1e-5)
    said = {name: messages for name, (_, messages) in found.items()}
    (message,) = said.pop("all")
    assert "only one device here, 'cpu:0', so nothing is split" in message
    assert "keras_tp.launch --devices 2 script.py" in message
    assert not any(said.values()), said


def test_the_way_to_more_devices_is_true_in_a_notebook(monkeypatch):
    monkeypatch.setitem(sys.modules, "ipykernel", None)
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    hint = backend.distribution_lib.how_to_launch(4)
    code = hint.split("`")[1]
    assert "ipykernel" not in hint and "pytest" not in hint
    if keras.config.backend() == "torch":
        assert "a notebook is one process" in hint
        assert code == "python -m keras_tp.launch --devices 4 script.py"
        return
    assert "before you import Keras" in hint
    code += "\nimport keras_tp\nprint(keras_tp.distribution.get_device_count())"
    assert output_of(code).split() == ["4"]
