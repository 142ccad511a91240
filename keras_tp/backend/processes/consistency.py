"""Checks that the processes of a run agree, and stops all of them if not.

All of these functions are collectives. `gather` is the backend's function that
gathers a small value from every process into a list.
"""

import hashlib
import pickle
import random

import keras
import numpy as np
from keras.src.backend.common import global_state
from keras.src.distribution.distribution_lib import distribution
from keras.src.utils import rng_utils

_SAME_VALUES = (
    "Build the same layers in the same order with the same seed, and load the "
    "same files, in every process."
)


def same_everywhere(gather, what, value, way_out, groups=None):
    """Raises on every process unless all of them hold the same value.

    Args:
        gather: Function.
        what: String that names the value.
        value: Bytes, or any object that `pickle` supports. Its digest is
            compared.
        way_out: String. Sentence that says how to make the values equal.
        groups: List with the group of each process. Values are compared
            within a group. Defaults to `None`: all processes are one group.

    Returns:
        List with the digest of each process.
    """
    if not isinstance(value, bytes):
        value = pickle.dumps(value)
    digests = gather(hashlib.sha256(value).hexdigest()[:16])
    groups = [0] * len(digests) if groups is None else groups
    if len(set(zip(groups, digests))) > len(set(groups)):
        shown = ", ".join(f"{i}: {d}" for i, d in enumerate(digests))
        of_what = "one model group" if len(set(groups)) > 1 else "this run"
        raise ValueError(
            f"The processes of {of_what} hold different {what}, and would "
            f"train different models. {way_out} Received digests by process: "
            f"{shown}"
        )
    return digests


def one_seed(gather, is_first):
    """Sets the random state of process 0 in all processes.

    Initial values, shuffling and dropout masks are then equal in all of them.

    Args:
        gather: Function.
        is_first: Boolean. Whether this is process 0.

    Raises:
        ValueError: on every process, if they were given different seeds.
    """
    seeds = gather(rng_utils.get_random_seed())
    if len(set(seeds)) > 1:
        raise ValueError(
            "The processes of this run were given different seeds, and would "
            "train different models. Call `keras.utils.set_random_seed` with "
            "the same seed in every process, or in none. Received seeds by "
            f"process: {dict(enumerate(seeds))}"
        )
    generator = global_state.get_global_attribute("global_seed_generator")
    own = None
    if is_first:
        counter = None
        if generator is not None:
            counter = keras.ops.convert_to_numpy(generator.state.value)
        own = (random.getstate(), np.random.get_state(), counter)
    python, numpy, counter = gather(own)[0]
    random.setstate(python)
    np.random.set_state(numpy)
    if generator is not None and counter is not None:
        generator.state.assign(counter)


def same_array(gather, array, what="values"):
    """Raises on every process unless all of them hold the same array."""
    digest = hashlib.sha256(f"{array.shape} {array.dtype} ".encode())
    # Not `tobytes`: a copy of a large table may not fit.
    digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    same_everywhere(gather, what, digest.digest(), _SAME_VALUES)


def same_model(gather, model):
    """Compares a model and its layouts between all processes.

    Values are not compared. Without a distribution, nothing is.

    Args:
        gather: Function.
        model: A Keras model.

    Raises:
        ValueError: on every process, with the first line that differs.
    """
    current = distribution()
    if current is None:
        return
    lines = _described(model, current)
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    if len(set(gather(digest))) == 1:
        return
    held = gather(lines)
    count = max(len(lines) for lines in held)
    held = [lines + ["nothing more"] * (count - len(lines)) for lines in held]
    first = next(row for row in zip(*held) if len(set(row)) > 1)
    differing = "; ".join(
        f"{line} in process(es) "
        f"{[index for index, other in enumerate(first) if other == line]}"
        for line in dict.fromkeys(first)
    )
    raise ValueError(
        f"The processes of this run hold different models named "
        f"{model.name!r}, or different layouts for them, and would wait for "
        "each other forever. Build the same layers in the same order, under "
        "the same distribution, in every process: a model that only some of "
        "them build changes the names of later ones. Received, as the first "
        f"difference: {differing}"
    )


def _described(model, current):
    """Returns one line for each property that all processes share."""
    mesh = current.device_mesh
    sizes = ", ".join(f"{a}={n}" for a, n in zip(mesh.axis_names, mesh.shape))
    lines = [
        f"{type(current).__name__} on a mesh of ({sizes}) with devices "
        f"{[str(device) for device in mesh.devices.flatten()]}, batches split "
        f"over {current.batch_dim_name!r}"
    ]
    variables = list(model.variables)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        variables += optimizer.variables
        lines.append(f"optimizer {type(optimizer).__name__}")
    for variable in variables:
        layout = getattr(variable._layout, "axes", variable._layout)
        lines.append(
            f"variable {variable.path!r} of shape {tuple(variable.shape)}, "
            f"{variable.dtype}, layout {layout}"
            f"{'' if variable.trainable else ', not trainable'}"
        )
    return lines
