"""Writes `benchmarks/ops.md`: how functions of Keras end on each backend.

    export KERAS_TP_SLOW=1 KERAS_TP_OPS_FOLDER=found
    pytest integration_tests/ops_test.py integration_tests/ops_layers_test.py
    python integration_tests/ops_table.py found

The tests add a line for each case and split to `found/<backend>.jsonl`; a later
run of a function takes the place of an earlier one.
"""

import argparse
import collections
import json
import pathlib

BACKENDS = ("jax", "tensorflow", "torch")
OUTCOMES = ("split", "whole", "refused", "not there", "wrong")
TABLE = pathlib.Path(__file__).parent.parent / "benchmarks" / "ops.md"
HEAD = """# Functions of Keras with split inputs

Written by `python integration_tests/ops_table.py`, from runs of
`integration_tests/ops_test.py` and `ops_layers_test.py` on 2 devices. Each
divisible dim of each input is split, and pairs of dims of two inputs; results
and gradients are compared with those of one device. The numbers say how many
of these splits end so:

- split: right, and no device holds more than its part of the result;
- whole: right, and every device holds all of it;
- refused: an error that names the operation;
- not there: Keras itself does not run the case on this backend;
- wrong: an open defect, listed in `ops_listed.OPEN`.

Where two inputs are split, what is right counts as split. The reasons are in
`integration_tests/ops_listed.py`. On JAX, XLA decides what is whole. A function
without numbers was not run there.

"""


def read(path):
    """Returns a dict of function to a counter of outcomes."""
    found = {}
    for line in path.read_text().splitlines():
        name, case, dims, outcome, _ = json.loads(line)
        found.setdefault(name, {})[case, str(dims)] = outcome
    return {
        name: collections.Counter(cases.values())
        for name, cases in found.items()
    }


def _cell(counter):
    return ", ".join(
        f"{outcome} {counter[outcome]}"
        for outcome in OUTCOMES
        if counter.get(outcome)
    )


def table(folder):
    """Returns the text of the page, from a file of each backend."""
    found = {name: read(folder / f"{name}.jsonl") for name in BACKENDS}
    lines = [f"| function | {' | '.join(BACKENDS)} |", "|---|---|---|---|"]
    for name in sorted(set().union(*found.values())):
        cells = [_cell(found[backend].get(name, {})) for backend in BACKENDS]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    TABLE.write_text(table(parser.parse_args().folder))
