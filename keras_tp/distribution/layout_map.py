"""Maps paths to layouts, and reports patterns without a match."""

import collections
import difflib
import math
import re
import warnings

from keras.src.distribution import distribution_lib as keras_lib

from keras_tp.distribution import arguments
from keras_tp.distribution.planning.cost import item_bytes
from keras_tp.distribution.tensor_layout import as_layout
from keras_tp.distribution.tensor_layout import format_bytes
from keras_tp.distribution.variable_origin import SEED
from keras_tp.distribution.variable_origin import WEIGHT
from keras_tp.distribution.variable_origin import origin_of

# A variable of two dims or more above this size is worth splitting.
LARGE_VARIABLE_BYTES = 2**20

# Names that Keras gives to unnamed models.
_DEFAULT_MODEL_NAME = re.compile(r"(sequential|functional|model)(_\d+)?")


class LayoutMap(keras_lib.LayoutMap):
    """A dict of path patterns to layouts that reports missing matches.

    It works as `keras.distribution.LayoutMap` does: a key is a regex that must
    match the whole path (`re.fullmatch`) of a variable, or of a layer's
    output (`<layer path>/output`). In addition:

    - A path is looked up in full first, then without the name of its outermost
      model, because Keras renames a model that is built a second time
      (`sequential_1/...`) and drops the name in `load_model`. The second case
      gives a warning.
    - Before a model's first compile, fit or call, patterns that match nothing
      and large variables that match no pattern give a warning.

    Example:

    ```python
    layout_map = LayoutMap(device_mesh)
    layout_map[".*up/kernel"] = (None, "model")
    layout_map[".*down/kernel"] = ("model", None)
    layout_map[".*embeddings"] = (("batch", "model"), None)
    layout_map.strict = True
    ```

    Args:
        device_mesh: `DeviceMesh` that the layouts refer to.

    Attributes:
        strict: Boolean. Whether a problem found in a model is a `ValueError`
            instead of a warning. Defaults to `False`. Give a path an explicit
            layout, such as `(None, None)`, to leave it replicated in strict
            mode.
    """

    def __init__(self, device_mesh):
        if device_mesh is not None:
            arguments.check_mesh(device_mesh)
        super().__init__(device_mesh)
        self.strict = False
        self._pattern_of = {}
        self._announced = set()

    @classmethod
    def from_keras(cls, layout_map):
        """Converts a `keras.distribution.LayoutMap` to this class."""
        if isinstance(layout_map, cls):
            return layout_map
        own = cls(layout_map.device_mesh)
        for pattern, layout in layout_map.items():
            own[pattern] = layout
        return own

    def __getitem__(self, key):
        # A bare path does not say whether it begins with a model's name. It
        # may if a layer and a variable follow.
        root = key.split("/")[0] if key.count("/") >= 2 else None
        return self.layout_for(key, root=root)

    def __setitem__(self, key, layout):
        try:
            re.compile(key)
        except (re.error, TypeError) as e:
            raise ValueError(
                "A key of a LayoutMap must be a string, a regular expression "
                f"that matches paths: {e}. Received: key={key!r}"
            ) from e
        value = as_layout(layout, f"layout_map[{key!r}]")
        try:
            super().__setitem__(key, value)
        except ValueError as e:
            if key in self._layout_map:
                raise
            raise ValueError(
                f"{layout} should be a TensorLayout, or a tuple with a mesh "
                f"axis or None for each dim. {e}"
            ) from e
        self._pattern_of.clear()

    def __delitem__(self, key):
        self._pattern_of.clear()
        return super().__delitem__(key)

    def layout_for(self, path, root=None):
        """Returns the layout of a path; `None` if no pattern matches.

        Args:
            path: String, path of a variable or of a layer's output.
            root: String, the first part of `path` if it is the name of a model.
                Defaults to `None`.

        Raises:
            ValueError: if several patterns match.
        """
        pattern = self.pattern_for(path, root)
        return None if pattern is None else self._layout_map[pattern]

    def pattern_for(self, path, root=None):
        """Returns the key that gives a path its layout, or `None`."""
        found = self._pattern_of
        if (path, root) not in found:
            found[path, root] = self._find(path, root)
        return found[path, root]

    def report(self, model):
        """Returns a `LayoutReport` of this map on a built model."""
        return LayoutReport(self, model)

    def _find(self, path, root):
        if path in self._layout_map:
            return path
        matches = [key for key in self._layout_map if re.fullmatch(key, path)]
        if not matches:
            matches = [
                key
                for key in self._layout_map
                if _matches_without_root(key, path, root)
            ]
            self._announce(matches, path, root)
        if len(matches) > 1:
            raise ValueError(
                f"Path '{path}' matches multiple layout specification keys: "
                f"{matches}. Please make sure each tensor/variable path only "
                "matches at most one layout specification key in the "
                "LayoutMap."
            )
        return matches[0] if matches else None

    def _announce(self, matches, path, root):
        # One warning for each pattern and model, not for each variable.
        if len(matches) != 1 or (matches[0], root) in self._announced:
            return
        self._announced.add((matches[0], root))
        warnings.warn(
            f"No pattern of the LayoutMap matches the path {path!r} in full; "
            f"it gets the layout of {matches[0]!r}, which matches without the "
            "name of the outermost model. Keras renames a model that is built "
            "again and drops its name in load_model. Begin the pattern with "
            "'.*' to match under any name.",
            stacklevel=2,
        )

    def __repr__(self):
        return (
            f"<{self.__class__.__name__} {dict(self._layout_map)}, "
            f"strict={self.strict}>"
        )


class LayoutReport:
    """The matches of a `LayoutMap` in one model, and the missing ones.

    Args:
        layout_map: `LayoutMap`.
        model: A built Keras model.

    Attributes:
        matched: Dict of pattern to the list of paths that it gives a layout.
        dead: Dict of each pattern that matches nothing to the nearest paths.
        unmatched: List of `(path, shape, bytes)` of the weights that no
            pattern matches, the largest first. It leaves out slots and the
            variables that LoRA and quantization add, which take the layout of
            their variable or kernel, and random state, which is replicated.
        ambiguous: Dict of pattern to the paths that it matches only without
            the name of their outermost model, if it matches others in full.
    """

    def __init__(self, layout_map, model):
        self.layout_map = layout_map
        self.model_name = model.name
        self.matched = collections.defaultdict(list)
        self.unmatched = []
        paths, outputs = [], list(_output_paths(model))
        for variable in model.variables:
            path, origin = variable.path, origin_of(variable)
            if origin.role not in (WEIGHT, SEED):
                continue
            paths.append((path, origin.root))
            is_own = origin.role == WEIGHT and origin.follows is None
            if is_own and layout_map.pattern_for(path, origin.root) is None:
                self.unmatched.append(
                    (path, variable.shape, variable_bytes(variable))
                )
        for path, root in paths + outputs:
            pattern = layout_map.pattern_for(path, root)
            if pattern is not None:
                self.matched[pattern].append(path)
        self.unmatched.sort(key=lambda row: (-row[2], row[0]))
        self.dead = {
            pattern: _nearest(
                pattern, outputs if "output" in pattern else paths
            )
            for pattern in layout_map
            if pattern not in self.matched
        }
        self.ambiguous = {}
        for pattern, found in self.matched.items():
            other = [p for p in found if not re.fullmatch(pattern, p)]
            if other and len(other) < len(found):
                self.ambiguous[pattern] = other

    @property
    def large_unmatched(self):
        """The rows of `unmatched` that are worth splitting."""
        return [
            row
            for row in self.unmatched
            if len(row[1]) >= 2 and row[2] > LARGE_VARIABLE_BYTES
        ]

    def problems(self):
        """Returns a list of messages, one for each problem."""
        found = [
            f"The pattern {pattern!r} of the LayoutMap matches no variable or "
            f"layer output of model {self.model_name!r} (the whole path has "
            f"to match). {_advice(pattern, near)}"
            for pattern, near in self.dead.items()
        ]
        found += [
            f"The pattern {pattern!r} of the LayoutMap matches some paths of "
            f"model {self.model_name!r} in full, but {paths} only without the "
            "name of the outermost model. This is probably a mistake. Begin "
            "the pattern with '.*' to match all of them, or give these paths "
            "in full."
            for pattern, paths in self.ambiguous.items()
        ]
        mesh = self.layout_map.device_mesh
        large = self.large_unmatched if mesh is not None else []
        if large and math.prod(mesh.shape) > 1:
            rows = "; ".join(
                f"{path!r} of shape {tuple(shape)}, {format_bytes(size)}"
                for path, shape, size in large[:5]
            )
            more = f" and {len(large) - 5} more" if len(large) > 5 else ""
            found.append(
                f"{len(large)} large variable(s) of model {self.model_name!r} "
                "match no pattern of the LayoutMap, so each device holds them "
                f"whole: {rows}{more}. Add a pattern. To replicate them "
                "without this warning, give them a layout of Nones, such as "
                "(None, None)."
            )
        return found

    def __str__(self):
        lines = [f"LayoutMap on model {self.model_name!r}:"]
        for pattern, paths in self.matched.items():
            layout = self.layout_map._layout_map[pattern]
            lines.append(f"  {pattern!r} -> {layout.axes}: {len(paths)} paths")
        for pattern, near in self.dead.items():
            lines.append(f"  {pattern!r}: matches nothing; nearest: {near}")
        for path, shape, size in self.unmatched:
            lines.append(
                f"  {path} {tuple(shape)}: no pattern, {format_bytes(size)}"
            )
        return "\n".join(lines)

    def __repr__(self):
        return (
            f"<{self.__class__.__name__} {len(self.matched)} patterns match, "
            f"{len(self.dead)} dead, {len(self.unmatched)} variables unmatched>"
        )


def variable_bytes(variable):
    """Returns the size of a whole variable in bytes."""
    # `variable.dtype` is the compute dtype, `_dtype` the stored one.
    return math.prod(variable.shape) * item_bytes(variable._dtype)


def _matches_without_root(pattern, path, root):
    """Whether a pattern matches without the model's name on either side."""
    tail = _pattern_tail(pattern)
    short = path[len(root) + 1 :] if root and path != root else None
    pairs = (pattern, short), (tail, path), (tail, short)
    return any(None not in pair and re.fullmatch(*pair) for pair in pairs)


def _pattern_tail(pattern):
    """Returns a pattern without its leading model name, or `None`.

    The first part of a pattern such as `block/.*kernel` is most likely a layer,
    and the rest would match too much. So the second part must be literal too,
    or the first part must be a name that Keras gives to unnamed models.
    """
    found = re.fullmatch(r"([\w\-]+)/(.+)", pattern)
    if found is None:
        return None
    root, tail = found.groups()
    # Without its layer, `up/output` would match the output of each model.
    literal = tail != "output" and re.match(r"[\w\-]+(/|$)", tail)
    return tail if literal or _DEFAULT_MODEL_NAME.fullmatch(root) else None


def _output_paths(model):
    """Yields `(path, root)` of each layer output that a layout can name."""
    for layer in model._flatten_layers():
        parent = layer._parent_path
        if parent is None:
            continue
        path = f"{parent}/{layer.name}" if parent else layer.name
        first = path.split("/")[0]
        root = first if first == model.name and first != path else None
        yield f"{path}/output", root


def _nearest(pattern, paths, count=3):
    """Returns the paths nearest to a pattern that matches nothing."""
    paths = [path for path, _ in paths]
    inside = [path for path in paths if re.search(pattern, path)]
    literal = re.sub(r"\\[dwsDWS]|[\\^$.*+?{}\[\]|()]", "", pattern)
    close = difflib.get_close_matches(literal, paths, n=count, cutoff=0.0)
    return list(dict.fromkeys(inside[:count] + close))[:count]


def _advice(pattern, near):
    if not near:
        return "The model has no variables."
    advice = f"Nearest paths: {', '.join(repr(path) for path in near)}."
    if re.search(pattern, near[0]):
        inner = pattern.removeprefix(".*").removesuffix(".*")
        advice += f" '.*{inner}.*' would match."
    return advice
