"""Compares compiled train steps on JAX: keras_tp, by hand, and on one device.

The programs are those that `sides_jax.py` times. The figures are XLA's, for one
device. They are the same on a busy machine.

    python benchmarks/programs.py --devices 4
"""

import argparse
import os
import re

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--devices", type=int, default=4)
parser.add_argument("--hidden", type=int, default=256)
parser.add_argument("--layers", type=int, default=2)
OPTIONS = parser.parse_args()
OPTIONS.steps, OPTIONS.jit = 1, False
os.environ["KERAS_BACKEND"] = "jax"
os.environ["KERAS_TP_CPU_DEVICES"] = str(OPTIONS.devices)
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        f"--xla_force_host_platform_device_count={OPTIONS.devices}",
    ]
)

import decoder
import jax
import native_jax
from rich.console import Console
from rich.table import Table

import keras_tp

X, Y = decoder.make_data(OPTIONS)


def of_keras():
    """Returns the compiled step of the Keras model, and its first weights."""
    model = decoder.build_model(OPTIONS)
    weights = {v.path: v.numpy() for v in model.trainable_variables}
    decoder.train_epoch(model, X, Y)
    state = model._get_jax_state(
        trainable_variables=True,
        non_trainable_variables=True,
        optimizer_variables=True,
        metrics_variables=True,
    )
    step = jax.jit(model.train_step, donate_argnums=0)
    return step.lower(state, (X, Y)).compile(), weights


def by_hand(weights, device_count):
    """Returns the compiled step of the program by hand."""
    trainer = native_jax.Trainer(OPTIONS, weights, device_count)
    return trainer.step.lower(trainer.state, X, Y).compile()


def main():
    """Prints a table, one row for each program."""
    own = decoder.distribution_of(keras_tp.distribution, OPTIONS)
    with own.scope():
        split, weights = of_keras()
    keras_tp.uninstall()
    programs = {
        "keras_tp": split,
        "shard_map": by_hand(weights, OPTIONS.devices),
        "keras, 1 device": of_keras()[0],
        "jax, 1 device": by_hand(weights, 1),
    }
    table = Table("program", "MFLOP", "MB", "all-reduces", "copies", "all")
    for name, compiled in programs.items():
        text = compiled.as_text()
        opcodes = re.findall(r"= \S+ ([a-z\-]+)\(", text)
        cost = compiled.cost_analysis()
        table.add_row(
            name,
            f"{cost['flops'] / 1e6:.1f}",
            f"{cost['bytes accessed'] / 1e6:.1f}",
            str(opcodes.count("all-reduce")),
            str(opcodes.count("copy")),
            str(len(opcodes)),
        )
    Console(width=80).print(table)


main()
