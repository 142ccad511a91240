"""Loads values by path into a model whose paths may differ.

`Model.set_state_tree`, which loads Orbax checkpoints, skips a value if no
variable has its path. Paths differ because a loaded `Sequential` loses its name
and seed generators are numbered in each process. Such values are matched by the
rest of the path; a value without a match is an error.
"""

import collections
import functools
import re
import warnings

from keras.src import optimizers

from keras_tp.backend.saving import one_writer

_SEED = "seed_generator_state"
_WEIGHTS = ("trainable_variables", "non_trainable_variables")
_loading = []


def load_whole(original):
    """Wraps the loading of Orbax checkpoints: every variable needs a value."""

    @functools.wraps(original)
    def _load_model_from_orbax_checkpoint(*args, **kwargs):
        _loading.append(True)
        try:
            return original(*args, **kwargs)
        finally:
            _loading.pop()

    return _load_model_from_orbax_checkpoint


def match_paths(original):
    """Wraps `Model.set_state_tree`: paths may differ in names and numbers."""

    @functools.wraps(original)
    def set_state_tree(self, state_tree):
        if not one_writer.has_a_layout(self):
            return original(self, state_tree)
        found = {}
        for kind, tree in state_tree.items():
            values = self._flatten_nested_dict(tree)
            found[kind] = _by_own_path(self, kind, values)
        return original(self, found)

    return set_state_tree


def _by_own_path(model, kind, values):
    """Returns a dict of the paths of a model's own variables to values."""
    if kind == "optimizer_variables":
        variables = getattr(model.optimizer, "variables", [])
    else:
        variables = getattr(model, kind, [])
    shapes = {v.path: tuple(v.shape) for v in variables}
    if kind not in (*_WEIGHTS, "optimizer_variables") or not shapes:
        # Metrics are made when they are needed.
        return values
    if len(shapes) != len(variables):
        return values
    if kind == "optimizer_variables" and len(values) > len(shapes):
        warnings.warn(
            f"The optimizer has {len(shapes)} variables and the checkpoint "
            f"{len(values)}: its state is not loaded. Build the optimizer "
            "before: `model.optimizer.build(model.trainable_variables)`.",
            stacklevel=4,
        )
        return {}
    is_optimizer = kind == "optimizer_variables" and len(values) < len(shapes)
    if is_optimizer and set(values) == _made_at_once(model):
        # The optimizer was not built yet when it was saved: it had no slots.
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
                f"The {kind} of the checkpoint are not those of model "
                f"{model.name!r}: their paths differ by more than the name of "
                "the model, or their shapes differ. Build the model that was "
                "saved, and load its weights. Only in the checkpoint: "
                f"{sorted(set(part) - set(own))[:5]}. Only in the model: "
                f"{sorted(set(own) - set(part))[:5]}. Received: "
                f"{len(part)} values for {len(own)} variables"
            )
        found.update({mine: part[given] for mine, given in pairs.items()})
    return found


def _made_at_once(model):
    """Returns the paths of an optimizer's variables before it is built."""
    config = optimizers.serialize(model.optimizer)
    return {v.path for v in optimizers.deserialize(config).variables}


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
    """Groups paths that differ only in the numbers in their names.

    Returns:
        Dict of the path without numbers to the paths, in numeric order.
    """
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
    for key in given:
        if key.endswith(longest):
            yield "", key.removesuffix(longest)
    longest = max(given, key=len, default="")
    for key in own:
        if key.endswith(longest):
            yield key.removesuffix(longest), ""


def _changed(key, removed, added):
    return added + key.removeprefix(removed)
