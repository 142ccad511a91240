import sys

import keras
import pytest

from keras_tp.backend import current

POINTS = f"[{current.GROUP}]\nelsewhere = their_package.tensors\n"


@pytest.fixture(autouse=True)
def other_package(tmp_path, monkeypatch):
    """A package that is installed and registers a backend."""
    folder = tmp_path / "their_package" / "tensors"
    folder.mkdir(parents=True)
    for path in (folder.parent, folder):
        (path / "__init__.py").touch()
    (folder / "distribution_lib.py").write_text("WHO = 'them'\n")
    metadata = tmp_path / "their_package-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: their_package\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(POINTS)
    monkeypatch.syspath_prepend(tmp_path)
    current.package.cache_clear()
    yield
    current.package.cache_clear()
    for name in [n for n in sys.modules if n.startswith("their_package")]:
        del sys.modules[name]


def test_a_backend_of_another_package(monkeypatch):
    assert current.registered()["elsewhere"] == "their_package.tensors"
    monkeypatch.setenv(current.CHOICE, "elsewhere")
    assert current.load("distribution_lib").WHO == "them"


def test_the_backend_of_keras_by_default(monkeypatch):
    monkeypatch.delenv(current.CHOICE, raising=False)
    found = current.load("distribution_lib").__name__
    name = keras.config.backend()
    assert found == f"keras_tp.backend.{name}.distribution_lib"


def test_torch_on_devices_of_xla(monkeypatch):
    monkeypatch.delenv(current.CHOICE, raising=False)
    monkeypatch.setenv("KERAS_TORCH_DEVICE", "xla")
    own = keras.config.backend()
    assert current.name() == ("torch_xla" if own == "torch" else own)


def test_a_backend_that_is_not_there(monkeypatch):
    monkeypatch.setenv(current.CHOICE, "elsewhat")
    with pytest.raises(ValueError, match="There are:.*'elsewhere'"):
        current.load("distribution_lib")


def test_a_backend_for_another_one_of_keras(monkeypatch):
    own = keras.config.backend()
    monkeypatch.setenv(current.CHOICE, "jax" if own == "torch" else "torch")
    with pytest.raises(ValueError, match=f"Keras runs on '{own}'"):
        current.load("distribution_lib")
