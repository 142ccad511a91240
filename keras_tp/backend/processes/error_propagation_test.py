import subprocess
import sys

import pytest

from keras_tp.backend.processes import error_propagation
from keras_tp.backend.processes import heartbeats

# While process 0 is stopped, TensorFlow's store takes nothing and says nothing.
SCRIPT = """
import threading
import types

from keras_tp.backend.processes import error_propagation

def put(key, value):
    threading.Event().wait()

def get(key, seconds):
    raise TimeoutError(key)

store = types.SimpleNamespace(index=1, count=2)
error_propagation.together(store, put, get)
raise ValueError("the first error")
"""

# No launcher has started it.
BY_AN_ENGINE = """
import types

from keras_tp.backend.processes import error_propagation
from keras_tp.backend.processes import heartbeats

def get(key, seconds):
    raise TimeoutError(key)

heartbeats.cause = lambda seconds: "Process 2 has ended."
store = types.SimpleNamespace(index=1, count=4)
error_propagation.together(store, lambda key, value: None, get)
raise RuntimeError("Connection reset by peer")
"""


def test_a_process_that_failed_ends_if_the_store_does_not_answer():
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 1
    assert "ValueError: the first error" in ended.stderr


def test_an_error_names_its_cause_without_the_launcher():
    ended = subprocess.run(
        [sys.executable, "-c", BY_AN_ENGINE],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 1
    said = "RuntimeError: Connection reset by peer\nProcess 2 has ended.\n"
    assert said in ended.stderr


@pytest.mark.parametrize(
    ["text", "cause", "notes"],
    [
        ("Timed out waiting 90000ms", None, ["process 1 is at batch 2"]),
        (
            "Timed out waiting 90000ms",
            "Process 1 is gone.\n",
            ["Process 1 is gone."],
        ),
        ("a shape is wrong", None, []),
    ],
)
def test_a_communication_error_has_a_note(monkeypatch, text, cause, notes):
    monkeypatch.setattr(heartbeats, "cause", lambda seconds: cause)
    monkeypatch.setattr(heartbeats, "places", lambda: "process 1 is at batch 2")
    error = RuntimeError(text)
    error_propagation._add_cause(error)
    assert getattr(error, "__notes__", []) == notes
