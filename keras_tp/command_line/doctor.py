"""Shows the installed versions and tries each backend.

For each installed backend a small model with a split kernel runs on two
devices, in processes of its own. Its all-reduce is counted, and its result
compared with one device.
"""

import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import subprocess
import sys

import keras

from keras_tp import backend
from keras_tp.version import __version__

HELP = "what is installed, and whether it works"

CHECK = pathlib.Path(__file__).with_name("doctor_check.py")
PACKAGES = (
    "keras",
    "keras-hub",
    "numpy",
    "jax",
    "jaxlib",
    "tensorflow",
    "torch",
)
VARIABLES = (
    *("KERAS_BACKEND", "KERAS_HOME", "XLA_FLAGS", "JAX_PLATFORMS"),
    *("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"),
)


def add_arguments(parser):
    """Adds the arguments of this command."""
    parser.add_argument(
        "--devices",
        type=int,
        default=2,
        help="number of devices to try (default: %(default)s)",
    )
    parser.add_argument(
        "--timeout",
        type=int,
        default=300,
        help="seconds to wait for a backend (default: %(default)s)",
    )


def run(options):
    """Prints the state of each backend; returns 1 if an installed one fails."""
    print(f"keras_tp {__version__}, Python {platform.python_version()}")
    for name in PACKAGES:
        print(f"  {name} {_version(name)}")
    held = [
        f"{name}={value}"
        for name, value in sorted(os.environ.items())
        if name in VARIABLES or name.startswith("KERAS_TP_")
    ]
    print(f"Environment: {', '.join(held) or 'nothing is set'}")
    print(f"Backend of Keras: {keras.config.backend()}")
    results = []
    for name in backend.SUPPORTED_BACKENDS:
        if importlib.util.find_spec(name) is None:
            print(f"{name}: not installed; `pip install 'keras_tp[{name}]'`")
            continue
        works, text = check(name, options.devices, options.timeout)
        results.append(works)
        print(f"{name}: {text}")
    if not results:
        print("No backend is installed.")
    return 0 if results and all(results) else 1


def check(name, devices, timeout):
    """Tries a backend; returns whether it works, and what it says."""
    command = [
        *(sys.executable, "-m", "keras_tp.launch", "--devices", str(devices)),
        str(CHECK),
    ]
    environment = {**os.environ, "KERAS_BACKEND": name}
    try:
        result = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        return False, f"no answer within {timeout} s"
    lines = result.stdout.splitlines()
    if result.returncode or not lines:
        said = (result.stderr or result.stdout).strip().splitlines()
        return False, "fails:\n" + "\n".join(f"    {s}" for s in said[-15:])
    found = json.loads(lines[-1])
    count, size = found["all_reduce"]
    text = (
        f"{', '.join(found['devices'])}; {count} all-reduce of {size} bytes; "
        f"differs from one device by {found['difference']:.0e}"
    )
    return count >= 1 and found["difference"] < 1e-5, text


def _version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "is not installed"
