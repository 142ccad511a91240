"""Loads values by path into a model whose paths may differ.

`Model.set_state_tree`, which loads Orbax checkpoints, skips a value if no
variable has its path. Paths differ because a loaded `Sequential` loses its name
and seed generators are numbered in each process. Such values are matched by the
rest of the path; a value without a match is an error.
"""

import collections
import re
import warnings

from keras.src import optimizers

from keras_tp.backend import hooks
from keras_tp.backend.saving import one_writer

_SEED = "seed_generator_state"
_WEIGHTS = ("trainable_variables", "non_trainable_variables")
_loading = []


@hooks.around
def load_whole(original, /, *args, **kwargs):
    """Wraps the loading of Orbax checkpoints: every variable needs a value."""
    _loading.append(True)
    try:
        return original(*args, **kwargs)
    finally:
        _loading.pop()


@hooks.around
def match_paths(original, self, state_tree):
    """Wraps `Model.set_state_tree`: paths may differ in names and numbers."""
    if not one_writer.has_a_layout(self):
        return original(self, state_tree)
    found = {
        kind: _by_own_path(self, kind, self._flatten_nested_dict(tree))
        for kind, tree in state_tree.items()
    }
    return original(self, found)


def _by_own_path(model, kind, values):
    """Returns a dict of the paths of a model's own variables to values."""
    is_optimizer = kind == "optimizer_variables"
    owner, name = (
        (model.optimizer, "variables") if is_optimizer else (model, kind)
    )
    variables = getattr(owner, name, [])
    shapes = {v.path: tuple(v.shape) for v in variables}
    # Metrics are made when they are needed.
    is_known = is_optimizer or kind in _WEIGHTS
    if not is_known or not shapes or len(shapes) != len(variables):
        return values
    if is_optimizer and len(values) > len(shapes):
        warnings.warn(
            f"The optimizer has {len(shapes)} variables and the checkpoint has "
            f"{len(values)}, so the optimizer state is not loaded. Build the "
            "optimizer before loading: "
            "`model.optimizer.build(model.trainable_variables)`.",
            stacklevel=5,
        )
        return {}
    if is_optimizer and len(values) < len(shapes):
        # The optimizer had no slots if it was saved before it was built.
        config = optimizers.serialize(model.optimizer)
        if set(values) == {
            v.path for v in optimizers.deserialize(config).variables
        }:
            return values
    found = {}
    for is_seed in (False, True):
        part = {p: x for p, x in values.items() if p.endswith(_SEED) == is_seed}
        own = {p: s for p, s in shapes.items() if p.endswith(_SEED) == is_seed}
        if set(part) <= set(own) and (not _loading or set(part) == set(own)):
            found.update(part)
            continue
        pairs = _pairs(kind, list(part), list(own))
        wrong = pairs is None or [
            (mine, given)
            for mine, given in pairs.items()
            if getattr(part[given], "shape", ()) != own[mine]
        ]
        if wrong:
            raise ValueError(
                f"The {kind} of the checkpoint do not match model "
                f"{model.name!r}: their paths differ by more than the name of "
                "the model, or their shapes differ. Build the model that was "
                "saved, and load its weights. Only in the checkpoint: "
                f"{sorted(set(part) - set(own))[:5]}. Only in the model: "
                f"{sorted(set(own) - set(part))[:5]}. Received: {len(part)} "
                f"values for {len(own)} variables"
            )
        found.update({mine: part[given] for mine, given in pairs.items()})
    return found


def _pairs(kind, given, own):
    """Returns a dict of each path of a model to the path in the checkpoint.

    `None` if they differ by more than a prefix and the numbers in names.
    """
    # An optimizer's paths begin with its own name, which is ignored.
    start = "/" if kind == "optimizer_variables" else ""
    given, own = (_grouped(paths, start) for paths in (given, own))
    found = {}
    if start:
        # Variables of the optimizer itself, such as its number of steps.
        for key in [k for k in own if len(own[k]) == len(given.get(k, ()))]:
            found.update(zip(own.pop(key), given.pop(key)))
    counts = {key: len(paths) for key, paths in given.items()}
    for prefix in _prefixes(given, own):
        renamed = {_changed(key, *prefix): held for key, held in own.items()}
        if {key: len(held) for key, held in renamed.items()} == counts:
            for key, held in renamed.items():
                found.update(zip(held, given[key]))
            return found
    return None


def _grouped(paths, start):
    """Returns a dict of path without numbers to its paths, in their order."""
    found = collections.defaultdict(list)
    for path in paths:
        numbers, rest = [], []
        tail = path.partition(start)[2] if start else path
        for separator, name in re.findall(r"([/_]?)([^/_]+)", tail):
            if numbers and separator == "_" and name.isdigit():
                numbers[-1] += (int(name),)
            else:
                numbers.append(())
                rest.append(separator + name)
        found["".join(rest)].append((numbers, path))
    return {
        key: [path for _, path in sorted(held)] for key, held in found.items()
    }


def _prefixes(given, own):
    """Yields pairs of prefixes, to remove from a model's paths and to add."""
    yield "", ""
    longest = max(own, key=len, default="")
    yield from (
        ("", k.removesuffix(longest)) for k in given if k.endswith(longest)
    )
    longest = max(given, key=len, default="")
    yield from (
        (k.removesuffix(longest), "") for k in own if k.endswith(longest)
    )


def _changed(key, removed, added):
    return added + key.removeprefix(removed)
