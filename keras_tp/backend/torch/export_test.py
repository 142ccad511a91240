"""A split model is exported as a program for one device."""

import gc
import os
import subprocess
import sys

import keras
import numpy as np
import pytest
import torch
from keras import layers

from integration_tests import harness

RUN = """
import sys
import numpy as np
import torch
program = torch.export.load(sys.argv[1]).module()
outputs = program(torch.from_numpy(np.load(sys.argv[2])))
np.save(sys.argv[3], outputs.detach().numpy())
"""


def trained():
    layouts = {
        ".*up/kernel": (None, "model"),
        ".*up/bias": ("model",),
        ".*down/kernel": ("model", None),
    }
    with harness.model_parallel(layouts, harness.fitted((1, 2))).scope():
        keras.utils.set_random_seed(1)
        model = keras.Sequential(
            [
                keras.Input((6,)),
                layers.Dense(8, "gelu", name="up"),
                layers.BatchNormalization(),
                layers.Dense(4, name="down"),
            ]
        )
        model.compile("adam", "mse")
        x = np.random.default_rng(0).normal(size=(8, 6)).astype("float32")
        model.fit(x, x[:, :4], batch_size=8, verbose=0)
    return model, x


def test_a_process_without_keras_tp_runs_it(tmp_path):
    model, x = trained()
    expected = model.predict(x, verbose=0)
    split = harness.split_paths(model)
    assert split
    path = tmp_path / "model.pt2"
    model.export(path, format="torch", verbose=False)
    folder = harness.own_folder(tmp_path)
    np.save(folder / "x.npy", x[:1])
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("KERAS", "TORCHELASTIC", "RANK", "WORLD"))
    }
    command = [sys.executable, "-c", RUN, str(path), "x.npy", "y.npy"]
    subprocess.run(
        command, cwd=folder, env=environment, check=True, timeout=120
    )
    found = np.load(folder / "y.npy")
    np.testing.assert_allclose(found, expected[:1], rtol=1e-5, atol=1e-6)
    # The model goes on as it was, and no process keeps a whole kernel.
    assert harness.split_paths(model) == split
    gc.collect()
    shapes = {v.shape for v in model.weights if v.path in split}
    whole = [
        x
        for x in gc.get_objects()
        if type(x) is torch.nn.Parameter and tuple(x.shape) in shapes
    ]
    assert not whole
    np.testing.assert_array_equal(model.predict(x, verbose=0), expected)
    model.fit(x, x[:, :4], batch_size=8, verbose=0)
    assert np.abs(model.predict(x, verbose=0) - expected).max() > 1e-5


def test_one_process_writes_to_the_path(tmp_path, monkeypatch):
    model, _ = trained()
    path, written = tmp_path / "model.pt2", []
    save = torch.export.save

    def noted(program, filepath):
        written.append(filepath)
        save(program, filepath)

    monkeypatch.setattr(torch.export, "save", noted)
    model.export(path, format="torch", verbose=False)
    is_first = torch.distributed.get_rank() == 0
    assert (written == [str(path)]) == is_first
    assert path.exists()


def test_all_processes_meet_the_same_error(tmp_path):
    model, x = trained()
    split = harness.split_paths(model)
    with pytest.raises(ValueError, match="pt2"):
        model.export(tmp_path / "model.onnx2", format="torch", verbose=False)
    assert harness.split_paths(model) == split
    model.fit(x, x[:, :4], batch_size=8, verbose=0)
