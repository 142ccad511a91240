"""Trains a model of the shape of OPT-125M, split, against one device.

12 layers, hidden size 768, 12 heads, a vocabulary of 50272: built from its
config, with random weights. The script runs itself on one device and on those
that it is asked for, and compares logits before training, losses and bytes:

    python examples/opt125m.py --backend jax --devices 4 --steps 20
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

BATCH, LENGTH = 2, 32


def parse_options():
    """Returns the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="jax", help="(%(default)s)")
    parser.add_argument("--devices", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="(%(default)s)")
    parser.add_argument("--layers", type=int, default=12, help="(%(default)s)")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    return parser.parse_args()


def build(layers):
    """Returns the compiled model."""
    import keras
    import keras_hub

    keras.utils.set_random_seed(0)
    backbone = keras_hub.models.OPTBackbone(
        vocabulary_size=50272,
        num_layers=layers,
        num_heads=12,
        hidden_dim=768,
        intermediate_dim=3072,
        max_sequence_length=LENGTH,
        dropout=0.0,
    )
    model = keras_hub.models.OPTCausalLM(backbone, preprocessor=None)
    # The rate rises to its peak over 375M tokens, 0.5M in a batch
    # (https://arxiv.org/abs/2205.01068, section 2.2 and table 1).
    rate = keras.optimizers.schedules.PolynomialDecay(0.0, 750, 6e-4)
    model.compile(
        optimizer=keras.optimizers.Adam(rate),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=[],
    )
    return model


def train(options):
    """Trains on the devices that this process was started with."""
    import contextlib

    import keras
    import numpy as np

    from keras_tp import distribution

    parallel = contextlib.nullcontext()
    if options.devices > 1:
        mesh = distribution.DeviceMesh((options.devices,), ["model"])
        parallel = distribution.TensorParallel(mesh).scope()
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 50272, (BATCH, LENGTH + 1)).astype("int32")
    x = {
        "token_ids": tokens[:, :-1],
        "padding_mask": np.ones((BATCH, LENGTH), "int32"),
    }
    with parallel:
        model = build(options.layers)
        logits = model.predict(x, verbose=0)
        losses = [
            float(np.ravel(model.train_on_batch(x, tokens[:, 1:]))[0])
            for _ in range(options.steps)
        ]
    report = distribution.describe(model)
    if os.environ.get("RANK", "0") == "0":
        np.savez(
            options.run,
            logits=keras.ops.convert_to_numpy(logits),
            losses=losses,
            device_bytes=list(report.device_bytes.values()),
            total_bytes=report.total_bytes,
        )


def run_on(devices, options, folder):
    """Runs this script on a number of devices; returns what it found."""
    import numpy as np

    path = pathlib.Path(folder, f"{devices}.npz")
    command = [sys.executable, "-m", "keras_tp.launch"]
    command += ["--devices", str(devices), __file__, "--run", str(path)]
    command += ["--devices", str(devices), "--steps", str(options.steps)]
    command += ["--layers", str(options.layers)]
    root = str(pathlib.Path(__file__).parent.parent)
    env = {**os.environ, "KERAS_BACKEND": options.backend}
    env["PYTHONPATH"] = os.pathsep.join([root, env.get("PYTHONPATH", "")])
    subprocess.run(command, env=env, check=True)
    return np.load(path)


def main():
    """Prints the comparison as one line of JSON."""
    options = parse_options()
    if options.run:
        train(options)
        return
    import numpy as np

    with tempfile.TemporaryDirectory() as folder:
        plain = run_on(1, options, folder)
        split = run_on(options.devices, options, folder)
    want, got = plain["losses"], split["losses"]
    print(
        json.dumps(
            {
                "backend": options.backend,
                "devices": options.devices,
                "steps": options.steps,
                "layers": options.layers,
                "logits_difference": float(
                    np.max(np.abs(split["logits"] - plain["logits"]))
                ),
                "first_and_last_loss": [want[0], want[-1]],
                "loss_difference": float(np.max(np.abs(got / want - 1))),
                "after_5_steps": float(np.max(np.abs(got / want - 1)[:5])),
                "total_bytes": int(split["total_bytes"]),
                "device_bytes": split["device_bytes"].tolist(),
            }
        )
    )


if __name__ == "__main__":
    main()
