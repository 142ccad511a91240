"""Counts the collectives of a compiled JAX program in its optimised HLO."""

import math
import re

import jax
from keras.src import backend
from keras.src import tree
from keras.src.backend.jax import trainer as jax_trainer

# HLO opcode -> the name that all backends use.
OPCODES = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "collective-permute": "collective_permute",
}
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*-> .* \{$")
_COLLECTIVE = re.compile(rf" = (.*?) ({'|'.join(OPCODES)})(-start)?\(")
_CALLED = re.compile(
    r"\b(?:body|condition|calls|to_apply|true_computation|false_computation)"
    r"=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
_GROUPS_LISTED = re.compile(r"replica_groups=\{\{([\d,]*)\}")
_GROUPS_IOTA = re.compile(r"replica_groups=\[\d+,(\d+)\]")


def compile_step(model, x, y=None):
    """Compiles a model's step as `fit` or `predict` would; runs nothing."""
    data = (x,) if y is None else (x, y)
    data = tree.map_structure(backend.convert_to_numpy, data)
    batch = jax_trainer._distribute_data(data)
    is_training = y is not None
    if is_training:
        model._symbolic_build(data_batch=batch)
    elif not all(layer.built for layer in model._flatten_layers()):
        with backend.StatelessScope():
            model(batch[0])
    state = model._get_jax_state(
        trainable_variables=True,
        non_trainable_variables=True,
        optimizer_variables=is_training,
        metrics_variables=is_training,
    )
    step = jax.jit(model.predict_step)
    if is_training:
        step = jax.jit(
            model.train_step,
            donate_argnums=0,
            out_shardings=(None, model._get_state_sharding_spec()),
        )
    return step.lower(state, batch).compile()


def count(hlo):
    """Counts the collectives that one run of an HLO module executes.

    A combined operation counts once for each of its tensors, an operation in a
    loop once for each iteration. Groups of one device communicate nothing and
    are not counted.

    Args:
        hlo: String, text of an optimised HLO module.

    Returns:
        Dict of the collective's name to `(count, bytes)`, with the bytes of
        the results on one device.
    """
    entry, computations = _parse(hlo)
    total = {name: [0, 0] for name in OPCODES.values()}
    _add(computations, entry, 1, total)
    return {name: tuple(pair) for name, pair in total.items()}


def _parse(hlo):
    """Returns the entry computation's name, and each computation's lines."""
    computations = {}
    entry = None
    lines = None
    for line in hlo.splitlines():
        header = _COMPUTATION.match(line)
        if header:
            lines = computations[header.group(2)] = []
            if header.group(1):
                entry = header.group(2)
        elif lines is not None:
            lines.append(line)
    return entry, computations


def _add(computations, name, times, total):
    for line in computations[name]:
        found = _COLLECTIVE.search(line)
        if found and _group_size(line) != 1:
            result, opcode, start = found.groups()
            sizes = _array_bytes(result)
            if start and opcode == "all-gather":
                # A start operation returns its operands, then its results.
                sizes = sizes[len(sizes) // 2 :]
            elif start and opcode == "collective-permute":
                sizes = sizes[1:2]
            pair = total[OPCODES[opcode]]
            pair[0] += times * len(sizes)
            pair[1] += times * sum(sizes)
            continue
        trips = _TRIPS.search(line) if " while(" in line else None
        inner = times * int(trips.group(1)) if trips else times
        called = _CALLED.findall(line)
        for branches in _BRANCHES.findall(line):
            called += re.findall(r"[\w.\-]+", branches)
        for other in called:
            if other in computations:
                _add(computations, other, inner, total)


def _group_size(line):
    listed = _GROUPS_LISTED.search(line)
    if listed:
        return len(listed.group(1).split(","))
    iota = _GROUPS_IOTA.search(line)
    return int(iota.group(1)) if iota else None


def _array_bytes(result):
    sizes = []
    for dtype, shape in _ARRAY.findall(result):
        bits = 8 if dtype == "pred" else int(re.search(r"\d+", dtype).group())
        dims = [int(dim) for dim in shape.split(",") if dim]
        sizes.append(math.prod(dims) * bits // 8)
    return sizes
