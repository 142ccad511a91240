"""Trains models of the zoo, split over two devices, from given weights.

    KERAS_BACKEND=jax python -m keras_tp.launch --devices 2 \
        integration_tests/agreement.py FOLDER

The first run leaves its initial weights in the folder; runs after it, on other
backends, begin with them. Each writes `losses_<backend>.json`.
"""

import json
import os
import pathlib
import sys

# Next to the tests, not to this file.
sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import keras
import numpy as np

from integration_tests import harness
from integration_tests import zoo

# Dropout draws from each backend's own generator.
ALL = [name for name in zoo.CASES if name != "dropout"]
QUICK = [
    "mlp",
    "conv2d",
    "lstm",
    "multi_head_attention",
    "batch_normalization",
    "embedding_rows",
    "opt",
    "llama",
]
NAMES = ALL if os.environ.get("KERAS_TP_SLOW") == "1" else QUICK


def train(name, folder):
    """Trains one model on a 1x2 mesh, with SGD, which amplifies no rounding.

    Args:
        name: String, key of `zoo.CASES`.
        folder: Path of the folder with the initial weights.

    Returns:
        List of floats, the loss of each step.
    """
    case = zoo.CASES[name]
    with harness.model_parallel(case.layouts, (1, 2)).scope():
        model = harness.build(case)
    assert harness.split_paths(model) == case.split
    path = folder / f"{name}.npz"
    if path.exists():
        held = np.load(path)
        model.set_weights([held[weight.path] for weight in model.weights])
    else:
        np.savez(path, **harness.weights_of(model))
    return harness.train(case, model, "sgd").losses


def main(folder):
    losses = {name: train(name, folder) for name in NAMES}
    if os.environ.get("RANK", "0") == "0":
        path = folder / f"losses_{keras.config.backend()}.json"
        path.write_text(json.dumps(losses))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
