import _thread
import gc
import os
import pathlib
import queue
import sys
import sysconfig
import threading
import time
import weakref

import pytest

from keras_tp.backend.processes import user_code

SCRIPT = "/home/somebody/script.py"


def defined(source, name, path=SCRIPT, **names):
    """Returns a function of a source that stands in a file of this path."""
    exec(compile(source, path, "exec"), names)
    return names[name]


@pytest.mark.parametrize("folder", ["distribution", "backend/torch"])
def test_the_line_of_user_code_is_not_one_of_keras_tp(folder):
    root = pathlib.Path(user_code.__file__).resolve().parents[2]
    path = root / folder / "model_hooks.py"
    entry = defined("def entry(call):\n    return call()\n", "entry", str(path))
    # This test is in the package, so it is no user code either.
    line, seconds = entry(user_code.Watch().look)
    assert "model_hooks.py" not in line
    assert seconds == 0


def test_code_that_called_a_package_has_a_line_and_no_time():
    entry = defined("def entry(call):\n    return call()\n", "entry")
    watch = user_code.Watch()
    for _ in range(2):
        assert entry(watch.look) == (f"{SCRIPT}:2 (entry)", 0.0)


@pytest.fixture(params=["event.wait()", "items.get()"])
def waiting(request):
    """A function of the user's that waits, and an event that it has begun."""
    names = {name: threading.Event() for name in ("event", "began")}
    names["items"] = queue.Queue()
    source = f"def callback():\n    began.set()\n    {request.param}\n"
    yield defined(source, "callback", **names), names["began"]
    names["event"].set()
    names["items"].put(None)
    # The next test must not find this thread.
    deadline = time.monotonic() + 60
    while user_code.Watch().look()[0].endswith("(callback)"):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_callback_in_a_thread_of_the_framework_counts(waiting):
    callback, began = waiting
    watch = user_code.Watch()
    _thread.start_new_thread(callback, ())
    assert began.wait(60)
    assert watch.look()[0].endswith("(callback)")
    line, seconds = watch.look()
    assert seconds > 0
    assert line.startswith(SCRIPT)


def test_a_generator_that_tf_data_reads_does_not(waiting):
    callback, began = waiting
    path = f"{sysconfig.get_path('purelib')}/tensorflow/script_ops.py"
    source = "def call():\n    callback()\n"
    watch = user_code.Watch()
    _thread.start_new_thread(
        defined(source, "call", path, callback=callback), ()
    )
    assert began.wait(60)
    watch.look()
    assert watch.look()[1] == 0


def test_a_thread_of_the_user_does_not(waiting):
    callback, began = waiting
    watch = user_code.Watch()
    threading.Thread(target=callback).start()
    assert began.wait(60)
    watch.look()
    line, seconds = watch.look()
    assert SCRIPT not in line
    assert seconds == 0


def test_a_look_keeps_nothing_alive():
    class Held:
        pass

    def held():
        kept = Held()
        user_code.Watch().look()
        return weakref.ref(kept)

    gc.disable()
    try:
        assert held()() is None
    finally:
        gc.enable()


def test_frames_of_other_threads_are_read_while_they_stay(waiting):
    """No garbage is collected meanwhile, so that no other thread runs.

    In Python 3.11 the function of a frame may else return before the object of
    the frame is made: that object is then another one, or none, and reading it
    may end the process by a signal.
    """
    callback, began = waiting
    _thread.start_new_thread(callback, ())
    assert began.wait(60)
    collected_in, me = [], threading.get_ident()

    def note(phase, info):
        frame = sys._getframe(1) if threading.get_ident() == me else None
        while frame is not None:
            collected_in.append(frame.f_code)
            frame = frame.f_back

    watch, threshold = user_code.Watch(), gc.get_threshold()
    gc.callbacks.append(note)
    gc.set_threshold(1)
    try:
        for _ in range(20):
            watch.look()
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(note)
    assert gc.isenabled()
    # Outside of the looks it is, which shows that it would be.
    assert collected_in
    assert user_code._look.__code__ not in collected_in


def test_a_fork_has_its_garbage_collected():
    """It waits until a look of another thread has ended."""
    assert gc.isenabled()
    ended = threading.Event()

    def look():
        while not ended.is_set():
            with user_code._without_garbage_collection():
                pass

    thread = threading.Thread(target=look)
    thread.start()
    try:
        for _ in range(20):
            process = os.fork()
            if process == 0:
                os._exit(0 if gc.isenabled() else 1)
            _, status = os.waitpid(process, 0)
            assert status == 0
    finally:
        ended.set()
        thread.join()
