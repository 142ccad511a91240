"""What the commands have in common: how models, meshes and sizes are named."""

import argparse
import importlib
import importlib.util
import math
import os
import pathlib
import re
import sys

from keras_tp.distribution.accelerators import ACCELERATORS
from keras_tp.distribution.accelerators import accelerator
from keras_tp.distribution.device_mesh import mesh_of_first_devices
from keras_tp.distribution.planning import cost

_UNITS = {"B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_UNITS.update({"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40})


class UsageError(ValueError):
    """A command line that cannot be run; the message says what to change."""


def argument(function):
    """Returns the `type` of an argument, whose errors are shown in full."""

    def read(text):
        try:
            return function(text)
        except ValueError as e:
            raise argparse.ArgumentTypeError(str(e)) from e

    return read


def add_model(parser):
    """Adds the argument that names a function which builds a model."""
    parser.add_argument(
        "model",
        metavar="MODULE:FUNCTION",
        help="function without arguments that builds a Keras model, such as "
        "`train:build_model` or `models/train.py:build_model`",
    )


def add_step(parser):
    """Adds the arguments that describe a training step."""
    add = parser.add_argument
    add(
        *("--batch-size", "-b"),
        type=int,
        default=32,
        help="global batch size (default: %(default)s)",
    )
    add(
        "--sequence-length",
        type=int,
        help="size of the unknown input dims beside the batch",
    )
    add(
        "--optimizer",
        default="adam",
        choices=sorted(cost.SLOTS),
        help="optimizer, for its slots (default: %(default)s)",
    )


def add_mesh(parser, **options):
    """Adds the argument that gives a mesh."""
    parser.add_argument(
        "--mesh",
        metavar="AXIS=SIZE,...",
        type=argument(mesh_of),
        help="axes of the mesh and their sizes, such as `batch=2,model=4`; "
        "the devices need not be here",
        **options,
    )


def mesh_of(text):
    """Returns the `DeviceMesh` of a text such as `"batch=2,model=4"`."""
    pairs = [part.partition("=") for part in text.split(",")]
    names = [name.strip() for name, _, _ in pairs]
    sizes = [size.strip() for _, _, size in pairs]
    if not all(names) or not all(re.fullmatch("[1-9][0-9]*", s) for s in sizes):
        raise ValueError(
            "A mesh is given as axes and sizes, such as `batch=2,model=4`. "
            f"Received: {text!r}"
        )
    return mesh_of_first_devices(tuple(map(int, sizes)), names)


def memory_of(text):
    """Returns the bytes of a text such as `"80GB"`, `"16 GiB"` or `"h100"`."""
    if text in ACCELERATORS:
        return accelerator(text).memory
    found = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get((found[2] or "B").upper()) if found else None
    if unit is None or found[1].count(".") > 1 or float(found[1]) <= 0:
        raise ValueError(
            "Memory is a number with a unit, such as `80GB` or `16GiB`, or the "
            f"name of an accelerator: {', '.join(ACCELERATORS)}. Received: "
            f"{text!r}"
        )
    return int(float(found[1]) * unit)


def load(name):
    """Returns the object that `module:name` or `file.py:name` names.

    Modules are searched in the current folder, too.
    """
    where, _, attribute = name.rpartition(":")
    if not where or not attribute:
        raise UsageError(
            "Name a function by its module or file, such as "
            f"`train:build_model`. Received: {name!r}"
        )
    if where.endswith(".py"):
        module = _module_of_file(pathlib.Path(where))
    else:
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        if importlib.util.find_spec(where.partition(".")[0]) is None:
            raise UsageError(f"There is no module {where!r}.")
        module = importlib.import_module(where)
    if not hasattr(module, attribute):
        raise UsageError(f"{where} has no {attribute!r}. Received: {name!r}")
    return getattr(module, attribute)


def build_fn(name):
    """Returns the function that builds a model, named as for `load`."""
    function = load(name)
    if not callable(function):
        raise UsageError(
            f"{name} has to be a function that builds a model. Received: "
            f"{function!r}"
        )
    return function


def count_of(mesh):
    """Returns the number of devices of a mesh."""
    return math.prod(mesh.shape)


def _module_of_file(path):
    if not path.is_file():
        raise UsageError(f"There is no file {path}.")
    # A script's imports of its neighbours work as when it is run.
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
