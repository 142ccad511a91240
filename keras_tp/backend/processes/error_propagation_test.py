import subprocess
import sys

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


def test_a_process_that_failed_ends_if_the_store_does_not_answer():
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 1
    assert "ValueError: the first error" in ended.stderr
