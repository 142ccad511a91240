"""Reports the bytes of a model on each device, and its collectives."""

import collections

from keras.src.distribution.distribution_lib import distribution as current

from keras_tp import backend
from keras_tp.backend.saving import atomic_files
from keras_tp.distribution import model_state
from keras_tp.distribution import optimizer_slots
from keras_tp.distribution import report_text
from keras_tp.distribution import variable_origin
from keras_tp.distribution.derived_variables import own_variables
from keras_tp.distribution.layout_map import variable_bytes
from keras_tp.distribution.pages import report_page
from keras_tp.distribution.planning.cost import CollectiveCount


class VariableReport(
    collections.namedtuple(
        "VariableReport",
        "path role shape dtype axes bytes device_bytes why slot_of",
        defaults=[""],
    )
):
    """One row of a `ShardingReport`.

    Args:
        path: String.
        role: One of `"weight"`, `"slot"`, `"metric"` and `"seed"`.
        shape: Tuple of ints, shape of the whole variable.
        dtype: String.
        axes: Tuple with `None`, a mesh axis or a tuple of mesh axes for each
            dim, read from the live array. `None` without a distribution.
        bytes: Int, size of the whole variable.
        device_bytes: Dict of device name to the bytes it holds.
        why: String, why the variable is replicated, or why the backend
            gathers a split variable to compute. Empty if the variable is split
            and each device computes with its part.
        slot_of: String, of a slot the path of its variable. Defaults to an
            empty string.
    """

    @property
    def is_split(self):
        """Whether each device holds less than the whole variable."""
        return any(held < self.bytes for held in self.device_bytes.values())


class ShardingReport:
    """Layouts and bytes of a model's variables, read from the live arrays.

    `print` shows a table, with repeated layers once. All sizes are in bytes.

    Args:
        model_name: String.
        rows: List of `VariableReport`.
        slots: Boolean. Whether the table has a row for each slot, metric and
            random state, too. `rows` always has them. Defaults to `False`.

    Attributes:
        rows: The list.
        total_bytes: Int, whole size of all variables.
        split_bytes: Int, whole size of the variables that are split.
        device_bytes: Dict of device name to the bytes it holds.
        replicated: List of the rows that are not split.
    """

    def __init__(self, model_name, rows, slots=False):
        self.model_name = model_name
        self.rows = rows
        self._slots = slots
        self.total_bytes = sum(row.bytes for row in rows)
        self.split_bytes = sum(row.bytes for row in rows if row.is_split)
        counted = collections.Counter()
        for row in rows:
            counted.update(row.device_bytes)
        self.device_bytes = dict(counted)
        self.replicated = [row for row in rows if not row.is_split]

    def __getitem__(self, path):
        """Returns the row of a path; `KeyError` if there is none."""
        for row in self.rows:
            if row.path == path:
                return row
        raise KeyError(path)

    def to_dict(self):
        """Returns the report as plain dicts and lists, ready for JSON."""
        return {
            "model": self.model_name,
            "total_bytes": self.total_bytes,
            "split_bytes": self.split_bytes,
            "device_bytes": self.device_bytes,
            "variables": [row._asdict() for row in self.rows],
        }

    def __repr__(self):
        share = self.split_bytes / self.total_bytes if self.total_bytes else 0.0
        return (
            f"<{self.__class__.__name__} model={self.model_name!r}, "
            f"{len(self.rows)} variables, {share:.1%} of the bytes split>"
        )

    def __str__(self):
        return report_text.text(self, self._slots)

    def to_html(self, path):
        """Writes the report as one HTML page, which needs no network.

        Args:
            path: String or path-like, the file to write.
        """
        with atomic_files.replaced(path) as new:
            with open(new, "w", encoding="utf-8") as file:
                file.write(report_page.page(self))

    def _repr_html_(self):
        return report_page.piece(self)


def describe(model, slots=False):
    """Reports how the variables of a model are split over the devices.

    A collective: in a run of several processes, every process must call this.

    Example:

    ```python
    report = describe(model)
    print(report)
    report["dense/kernel"].axes  # (None, "model")
    ```

    Args:
        model: A built Keras model. Its optimizer slots, metrics and random
            state are reported too.
        slots: Boolean. Whether the printed table lists each of those, too.
            Otherwise the slots of a variable are a column. Defaults to
            `False`.

    Returns:
        A `ShardingReport`, read from the live arrays.

    Raises:
        ValueError: if parts of the model have different distributions.
    """
    lib = backend.distribution_lib
    distribution = model_state.distribution_of(model)
    _meet(distribution, "`describe`")
    layers = {
        id(variable): layer
        for layer in model._flatten_layers()
        for variable in own_variables(layer)
    }
    owners = {
        id(slot): variable.path
        for slot, variable, _ in optimizer_slots.slots_of(
            getattr(model, "optimizer", None)
        )
    }
    rows = []
    for variable, role in model_state.variables_of(model):
        axes = lib.variable_axes(variable)
        rows.append(
            VariableReport(
                path=variable.path,
                role=role,
                shape=tuple(variable.shape),
                dtype=variable._dtype,
                axes=axes,
                bytes=variable_bytes(variable),
                device_bytes=lib.variable_bytes_by_device(variable),
                why=_why_gathered(variable, layers)
                if any(axes or ())
                else _why_replicated(variable, role, axes, distribution),
                slot_of=owners.get(id(variable), ""),
            )
        )
    return ShardingReport(model.name, rows, slots)


def count_collectives(model, x, y=None):
    """Counts the collectives in one step of a model.

    The counts are of the compiled program (JAX) or of a step that is run and
    then undone (TensorFlow, torch); they are not predicted. Weights, slots,
    metrics and random state keep their values, and layers that are not built
    are built. A
    collective: in a run of several processes, every process must call this.

    Example:

    ```python
    sums = count_collectives(model, x, y)["all_reduce"]
    print(sums.count, sums.bytes)
    ```

    Args:
        model: A Keras model; compiled with a loss and an optimizer if `y` is
            given.
        x: Inputs of one batch, as `train_on_batch` takes them.
        y: Targets of the batch. Defaults to `None`, which counts a forward
            pass; otherwise a train step is counted.

    Returns:
        Dict with a named pair `(count, bytes)` for each of `"all_reduce"`,
        `"all_gather"`, `"reduce_scatter"`, `"all_to_all"` and
        `"collective_permute"`. A combined operation counts once for each
        tensor in it. The bytes are the size of the results on one device. On
        CPU, XLA reduces the input gradients of parallel projections, such as
        query, key and value, one by one.

    Raises:
        ValueError: if parts of the model have different distributions, or the
            model has none and one is set.
    """
    with model_state.entered(model):
        _meet(current(), "`count_collectives`")
        model_state.adopt_state(model)
        model_state.check_complete_model(model)
        found = backend.distribution_lib.count_collectives(model, x, y)
    return {kind: CollectiveCount(*pair) for kind, pair in found.items()}


def _meet(distribution, what):
    """Waits for all processes if a distribution has several devices."""
    if distribution is not None and distribution.device_mesh.devices.size > 1:
        backend.distribution_lib.meet(what)


def _why_gathered(variable, layers):
    layer = layers.get(id(variable))
    lib = backend.distribution_lib
    return "" if layer is None else lib.why_gathered(variable, layer)


_WHY_REPLICATED = {
    variable_origin.SLOT: "its variable is replicated, or it is a counter",
    variable_origin.METRIC: "metrics are replicated",
    variable_origin.SEED: "random state is replicated",
}


def _why_replicated(variable, role, axes, distribution):
    if axes is None:
        return "the model has no distribution"
    if role in _WHY_REPLICATED:
        return _WHY_REPLICATED[role]
    origin = variable_origin.origin_of(variable)
    if origin.follows is not None:
        return origin.follows
    if hasattr(distribution, "why_replicated"):
        return distribution.why_replicated(variable)
    layout_map = getattr(distribution, "_layout_map", None)
    if layout_map is None:
        return "data parallelism replicates variables"
    if not variable.shape:
        return "a scalar"
    # Keras's own LayoutMap does not say which pattern matches.
    find = getattr(layout_map, "pattern_for", lambda *_: None)
    pattern = find(variable.path, origin.root)
    if pattern is None:
        return "no pattern matches"
    return f"the layout of {pattern!r} replicates it"
