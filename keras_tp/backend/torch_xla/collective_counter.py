"""Counts the collectives of one step in the program that XLA compiles.

torch_xla does not show a program after XLA has split it. So XLA writes each
program into a temporary folder, and this module reads the new ones.
"""

import contextlib
import itertools
import os
import pathlib
import tempfile

import torch
import torch_xla

from keras_tp.backend import hlo_collectives
from keras_tp.backend.torch_shared import undone_step
from keras_tp.backend.torch_xla import batches
from keras_tp.backend.torch_xla import processes

# XLA writes the programs of this name only.
_NAME = "keras_tp_counted"
_ENDING = "after_optimizations.txt"
_folders = []
_counts = itertools.count(1)


def keep_programs():
    """Makes XLA write the programs that are counted, before it starts."""
    if _folders:
        return
    _folders.append(tempfile.TemporaryDirectory(prefix="keras_tp_programs_"))
    ours = (
        f"--xla_dump_to={_folders[0].name} --xla_dump_hlo_as_text "
        f"--xla_dump_hlo_module_re=.*{_NAME}.*"
    )
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} {ours}".strip()


def forget_programs():
    """Undoes `keep_programs`, before another process starts."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    ours = ("--xla_dump_to=", "--xla_dump_hlo_")
    kept = [flag for flag in flags if not flag.startswith(ours)]
    os.environ["XLA_FLAGS"] = " ".join(kept)
    while _folders:
        _folders.pop().cleanup()


def count_step(model, x, y=None):
    """Runs one step of a model, counts its collectives, and undoes it."""
    batch = batches.distribute_batch(undone_step.prepare(model, x, y))
    found = {name: [0, 0] for name in hlo_collectives.NAMES}
    with undone_step.unchanged(model, torch.Tensor.detach, processes):
        undone_step.run(model, batch, _counting(found))
    torch_xla.sync()
    return {name: tuple(pair) for name, pair in found.items()}


@contextlib.contextmanager
def _counting(found):
    """Context that counts the collectives of what is recorded in it.

    Args:
        found: Dict of a collective's name to a list `[count, bytes]`, to which
            this adds.
    """
    torch_xla.sync(wait=True)
    lib = torch_xla._XLAC
    before = lib._get_current_graph_name()
    lib._set_current_graph_name(_NAME)
    # XLA compiles a program once. No other has a tensor of this size.
    size = 1000 + next(_counts)
    extra = torch.zeros(size, device="xla") + 1
    try:
        yield
        torch_xla.sync(wait=True)
    finally:
        lib._set_current_graph_name(before)
    del extra
    paths = list(pathlib.Path(_folders[0].name).glob(f"*{_ENDING}"))
    if not paths:
        raise RuntimeError(
            "XLA wrote no program to count. keras_tp has to be imported before "
            "anything runs on XLA's devices. Received: "
            f"XLA_FLAGS={os.environ.get('XLA_FLAGS')!r}"
        )
    for path in paths:
        for name, (count, size) in hlo_collectives.count(
            path.read_text()
        ).items():
            found[name][0] += count
            found[name][1] += size
        path.unlink()
