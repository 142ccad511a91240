"""Runs tests of Keras in this process, each with a distribution active.

`keras_suite.py` starts it; it is a script, and the plugin that this script
loads into pytest. The environment variable KERAS_TP_SUITE names a JSON file
with its task: see `settings`. For each test one line of JSON is
appended to `rows.<index of the process>`. On torch every process runs the same
tests, and goes on to the next one when all have ended this one.
"""

import hashlib
import json
import os
import pathlib
import random
import re
import shutil
import sys
import tempfile
import time
import types
import unittest
import zlib

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parent.parent
# Longer texts of errors are cut.
ERROR_LENGTH = 3000
# How this process ends where it can run no further test: the processes of a run
# are not in step any more, or TensorFlow has lost the devices of DTensor. A new
# one goes on with what is left.
OUT_OF_STEP = 77
# Tests that write files by hand, each process in its folder. Others have models
# saved, which several processes do together, in one folder.
WRITE_BY_HAND = ("utils/", "rejects_h5_soft_link")


def settings():
    """Returns what this process was told to do.

    A dict: `distribution`, `devices`, `source` (the folder that ids of tests
    begin in), `scratch` (a folder of all processes), `done` (tests not to run
    again), `only` (tests to run; `None` for all), `limit` (seconds that a
    process waits for the others).
    """
    return json.loads(pathlib.Path(os.environ["KERAS_TP_SUITE"]).read_text())


def make_distribution(name, devices):
    """Returns a new distribution over the first devices.

    Args:
        name: `"data"`, `"map"` or `"tensor"`.
        devices: Int, number of devices.
    """
    from keras_tp import distribution
    from keras_tp.distribution import tensor_layout
    from keras_tp.distribution import variable_origin
    from keras_tp.distribution.planning import planner

    class SplitAll(distribution.ModelParallel):
        """Splits every weight along its largest dim that divides."""

        def get_variable_layout(self, variable):
            layout = super().get_variable_layout(variable)
            is_weight = (
                variable_origin.origin_of(variable).role
                == variable_origin.WEIGHT
            )
            if variable._layout is not None or not is_weight:
                return layout
            if any(layout.axes):
                return layout
            mesh, shape = self.device_mesh, tuple(variable.shape)
            axes = tensor_layout.split_largest_dim(
                layout.axes, shape, planner.model_axis(mesh), mesh
            )
            return tensor_layout.layout_with(axes, mesh, uneven=True)

    class Noted:
        """Keeps whether anything was asked for; see `Plugin.was_asked`."""

        def __getattribute__(self, attribute):
            Plugin.was_asked = True
            return super().__getattribute__(attribute)

    def noted(cls, *args, **kwargs):
        return type(cls.__name__, (Noted, cls), {})(*args, **kwargs)

    names = distribution.list_devices()[:devices]
    if len(names) < devices:
        raise RuntimeError(f"{devices} devices are wanted; there are {names}")
    if name == "data":
        return noted(distribution.DataParallel, devices=names)
    if name == "tensor":
        mesh = distribution.DeviceMesh((devices,), ["model"], names)
        return noted(distribution.TensorParallel, mesh)
    shape = (1, 2) if devices == 2 else (2, devices // 2)
    mesh = distribution.DeviceMesh(shape, ["batch", "model"], names)
    return noted(SplitAll, layout_map=distribution.LayoutMap(mesh))


def eager_context():
    """Returns TensorFlow's context, which some tests replace by a new one."""
    module = sys.modules.get("tensorflow.python.eager.context")
    if os.environ["KERAS_BACKEND"] != "tensorflow" or module is None:
        return None
    return module._context


class Plugin:
    """Sets the distribution around each test and writes what came of it."""

    # Whether a test read an attribute of the distribution, or checked its
    # class. One that did not runs alike under any.
    was_asked = False

    def __init__(self):
        given = settings()
        self.name = given["distribution"]
        self.devices = given["devices"]
        self.limit = given["limit"]
        self.done = set(given["done"])
        self.only = given["only"] and set(given["only"])
        scratch = pathlib.Path(given["scratch"])
        self.shared = scratch / "shared"
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.results = scratch / f"rows.{self.rank}"
        self.running = scratch / f"running.{self.rank}"
        self.reports = []
        self.kept = True
        self.asked = True
        self.made = 0
        self.test = self.folder = ""
        seed_all("collection")
        if self.world_size > 1:
            self.share_folders()

    @pytest.hookimpl
    def pytest_configure(self, config):
        config.addinivalue_line(
            "markers", "requires_trainable_backend: all backends here are"
        )

    @pytest.hookimpl
    def pytest_collection_modifyitems(self, config, items):
        wanted = [item for item in items if self.is_wanted(item)]
        others = [item for item in items if not self.is_wanted(item)]
        items[:] = wanted
        if self.world_size > 1:
            # Some name folders by the address of the test.
            for item in wanted:
                item.module.id = lambda value: (
                    0 if isinstance(value, unittest.TestCase) else id(value)
                )
        config.hook.pytest_deselected(items=others)

    def is_wanted(self, item):
        test = id_of(item)
        if test in self.done:
            return False
        return self.only is None or test in self.only

    @pytest.hookimpl
    def pytest_collectreport(self, report):
        if report.failed and report.nodeid not in self.done:
            self.write(report.nodeid, "failed", 0, error_of(report))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item, nextitem):
        self.test = test = id_of(item)
        self.running.write_text(test)
        self.reports = []
        self.kept = True
        self.asked = True
        self.made = 0
        context = eager_context()
        digest = hashlib.sha256(test.encode()).hexdigest()
        self.folder = digest[:16]
        seed_all(test)
        begin = time.monotonic()
        result = yield
        outcome, error = outcome_of(self.reports)
        seconds = time.monotonic() - begin
        self.write(test, outcome, seconds, error)
        self.running.write_text("")
        if self.world_size > 1:
            self.meet(outcome)
        kept = context is None or eager_context() is context
        if self.name != "none" and not kept:
            sys.stdout.flush()
            os._exit(OUT_OF_STEP)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        # A test of a `TestCase` is set up in its call.
        if self.name == "none":
            return (yield)
        import keras

        from keras_tp import distribution

        value = make_distribution(self.name, self.devices)
        distribution.set_distribution(value)
        Plugin.was_asked = False
        try:
            return (yield)
        finally:
            self.asked = Plugin.was_asked
            self.kept = keras.distribution.distribution() is value
            distribution.set_distribution(None)

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report):
        self.reports.append(report)

    def write(self, test, outcome, seconds, error):
        row = {
            "test": test,
            "outcome": outcome,
            "seconds": round(seconds, 2),
            "kept": self.kept,
            "asked": self.asked,
            "error": error,
        }
        with open(self.results, "a") as file:
            file.write(json.dumps(row) + "\n")

    def share_folders(self):
        """Gives all processes the temporary folders that a test asks for."""
        make, remove_tree, remove = tempfile.mkdtemp, shutil.rmtree, os.remove

        def mkdtemp(suffix=None, prefix=None, dir=None):
            by_hand = any(name in self.test for name in WRITE_BY_HAND)
            if by_hand or not called_by_test():
                return make(suffix, prefix, dir)
            self.made += 1
            name = f"{prefix or 'tmp'}{self.folder}_{self.made}{suffix or ''}"
            folder = self.shared / name
            folder.mkdir(parents=True, exist_ok=True)
            return str(folder)

        def rmtree(path, *args, **kwargs):
            # Another process may still read there; all of it is removed in
            # the end.
            is_made = pathlib.Path(path).parent == self.shared
            if not (is_made or self.is_shared(path) and called_by_test()):
                remove_tree(path, *args, **kwargs)

        def remove_file(path, *args, **kwargs):
            if not (self.is_shared(path) and called_by_test()):
                return remove(path, *args, **kwargs)
            # Another process may still read it.
            self.made += 1
            self.exchange(f"{self.folder}.{self.made}.before", "")
            if self.rank == 0:
                remove(path, *args, **kwargs)
            self.exchange(f"{self.folder}.{self.made}.after", "")

        tempfile.mkdtemp = mkdtemp
        shutil.rmtree = rmtree
        os.remove = remove_file

    def is_shared(self, path):
        return str(path).startswith(str(self.shared))

    def meet(self, outcome):
        """Waits for the other processes; ends where they are out of step."""
        theirs = self.exchange(self.folder, outcome)
        # After a failure they may be, in a collective.
        if theirs != ["passed"] * self.world_size and theirs != (
            ["skipped"] * self.world_size
        ):
            sys.stdout.flush()
            os._exit(OUT_OF_STEP)

    def exchange(self, name, text):
        """Returns the texts of all processes that came in time."""
        folder = self.shared / "steps"
        folder.mkdir(parents=True, exist_ok=True)
        beside = folder / f"{name}.{self.rank}.part"
        beside.write_text(text)
        beside.rename(folder / f"{name}.{self.rank}")
        until = time.monotonic() + self.limit
        theirs = {}
        while len(theirs) < self.world_size and time.monotonic() < until:
            for rank in range(self.world_size):
                path = folder / f"{name}.{rank}"
                if rank not in theirs and path.exists():
                    theirs[rank] = path.read_text()
            time.sleep(0.002)
        return list(theirs.values())


def id_of(item):
    """Returns the id of a test, without addresses, which differ in each run."""
    return re.sub("0x[0-9a-f]+", "0x", item.nodeid)


def called_by_test():
    """Returns whether a folder is for a test, not for Keras's own use."""
    frame = sys._getframe(2)
    while frame.f_code.co_filename == tempfile.__file__:
        frame = frame.f_back
    return frame.f_code.co_filename.endswith(("_test.py", "/test_case.py"))


def outcome_of(reports):
    """Returns `(outcome, text of the error)` of the reports of one test."""
    failed = [report for report in reports if report.failed]
    if failed:
        return "failed", error_of(failed[0])
    skipped = [report for report in reports if report.skipped]
    if skipped:
        return "skipped", str(skipped[0].longrepr)
    return "passed", ""


def error_of(report):
    """Returns what went wrong, in a line, and the end of the traceback."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(report.longrepr)
    message = crash.message if crash else text.rstrip().splitlines()[-1]
    first = " ".join(message.split())[:300]
    return f"{first}\n{text[-ERROR_LENGTH:]}"


def seed_all(text):
    """Seeds what tests draw from without a seed, alike in each process."""
    seed = zlib.crc32(text.encode())
    random.seed(seed)
    np.random.seed(seed)


def make_generators_alike():
    """Makes unseeded generators take a seed from numpy's global state."""
    original, original_seed = np.random.default_rng, np.random.seed

    def default_rng(seed=None):
        return original(np.random.randint(2**31) if seed is None else seed)

    def set_seed(seed=None):
        original_seed(np.random.randint(2**31) if seed is None else seed)

    np.random.default_rng, np.random.seed = default_rng, set_seed


def conftest_of_keras():
    """Returns what tests import from Keras's own `conftest`."""
    module = types.ModuleType("conftest")

    def skip_if_backend(given_backend, reason):
        backend = os.environ["KERAS_BACKEND"]
        return pytest.mark.skipif(backend == given_backend, reason=reason)

    module.skip_if_backend = skip_if_backend
    return module


def main():
    given = settings()
    rank = int(os.environ.get("RANK", "0"))
    if rank:
        output = open(f"{given['scratch']}/output.{rank}", "a", buffering=1)
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    # Not from here; Keras's wheel does not have it.
    sys.modules["conftest"] = conftest_of_keras()
    sys.path[0] = str(ROOT)
    make_generators_alike()
    if given["distribution"] != "none":
        # TensorFlow's virtual devices are made when it is imported. Tests
        # import functions of Keras by name, which are replaced before.
        import keras_tp

        keras_tp.install()
    source = given["source"]
    code = pytest.main(
        [
            *("-c", os.devnull, "-p", "no:cacheprovider"),
            *("--rootdir", source, "--confcutdir", source),
            *("-q", "--no-header", "--tb=short", "-W", "ignore"),
            "--continue-on-collection-errors",
            *sys.argv[1:],
        ],
        plugins=[Plugin()],
    )
    ended = (
        pytest.ExitCode.OK,
        pytest.ExitCode.TESTS_FAILED,
        pytest.ExitCode.NO_TESTS_COLLECTED,
    )
    # torchrun ends all processes with the first that fails.
    return 0 if code in ended else int(code)


if __name__ == "__main__":
    sys.exit(main())
