"""Reads the text of a compiled HLO module into instructions."""

import collections
import math
import re

import numpy as np

# Instructions that run other computations as they are.
CONTROL = ("while", "conditional", "call")

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*-> .* \{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r" ?([\w\-]+)\(")
_NAME = re.compile(r"%([\w.\-]+)")
_ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
_CALLED = re.compile(
    r"\b(?:body|condition|calls|to_apply|true_computation|false_computation)"
    r"=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_GROUPS_LISTED = re.compile(r"replica_groups=\{\{([\d,]*)\}")
_PAIRS = re.compile(r"source_target_pairs=\{\{([\d,]*)\}")
_PARTITIONS = re.compile(r"\bnum_partitions=(\d+)")
_GROUPS_IOTA = re.compile(
    r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?"
)
# Axes of a mesh, and those over which the devices of a group differ.
_GROUPS_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")
_AXIS = re.compile(r"'([^']+)'=(\d+)")


class Array(collections.namedtuple("Array", ["dtype", "shape"])):
    """Dtype and shape of one array on one device."""

    @property
    def nbytes(self):
        bits = re.search(r"\d+", self.dtype)
        size = int(bits.group()) if bits else 8
        return math.prod(self.shape) * size // 8


class Instruction(
    collections.namedtuple(
        "Instruction", ["name", "opcode", "results", "operands", "text"]
    )
):
    """One instruction of a computation.

    Args:
        name: String.
        opcode: String, such as `"all-reduce-start"`.
        results: List of `Array`.
        operands: List of strings, names of instructions.
        text: String, the line.
    """

    @property
    def called(self):
        """Names of the computations that the instruction runs."""
        found = _CALLED.findall(self.text)
        for branches in _BRANCHES.findall(self.text):
            found += re.findall(r"[\w.\-]+", branches)
        return found

    @property
    def trips(self):
        """How often a loop runs its body; 1 if that is not known."""
        trips = _TRIPS.search(self.text) if self.opcode == "while" else None
        return int(trips.group(1)) if trips else 1

    @property
    def group(self):
        """Tuple of the devices of the first group, or `None` for all."""
        listed = _GROUPS_LISTED.search(self.text) or _PAIRS.search(self.text)
        if listed:
            return _ints(listed.group(1))
        iota = _GROUPS_IOTA.search(self.text)
        if iota is None:
            return _group_of_mesh(_GROUPS_MESH.search(self.text))
        shape, dims, order = (_ints(text or "") for text in iota.groups())
        devices = np.arange(math.prod(dims)).reshape(dims)
        if order:
            devices = devices.transpose(order)
        return tuple(devices.reshape(shape)[0].tolist())

    def attribute(self, pattern):
        """Returns the first group of a regex in the line, or `""`."""
        found = re.search(pattern, self.text)
        return found.group(1) if found else ""


class Module:
    """The computations of an HLO module.

    Args:
        text: String, text of an optimised HLO module.

    Attributes:
        entry: String, name of the computation that runs first.
        device_count: Int, number of devices that run the module.
    """

    def __init__(self, text):
        self.entry = None
        self._lines = {}
        self._found = {}
        partitions = _PARTITIONS.search(text)
        self.device_count = int(partitions.group(1)) if partitions else 1
        lines = None
        for line in text.splitlines():
            header = _COMPUTATION.match(line)
            if header:
                lines = self._lines[header.group(2)] = []
                if header.group(1):
                    self.entry = header.group(2)
            elif lines is not None:
                lines.append(line)

    def __contains__(self, name):
        return name in self._lines

    def instructions(self, name):
        """Returns the instructions of a computation, in their order.

        In a module with a schedule, that is the order in which they start.
        """
        return list(self.by_name(name).values())

    def joined(self, computation, name):
        """Returns the arrays that an instruction concatenates.

        Args:
            computation: String, name of its computation.
            name: String, name of the instruction, which may be a fusion.

        Returns:
            List of `Array`; empty if it concatenates nothing.
        """
        inside = self.by_name(computation)
        last = inside.get(name)
        if last is not None and last.opcode == "fusion":
            inside = self.by_name(last.called[0])
            last = list(inside.values())[-1]
        if last is None or last.opcode != "concatenate":
            return []
        return [inside[part].results[0] for part in last.operands]

    def by_name(self, name):
        """Returns a dict of name to instruction of a computation."""
        if name not in self._found:
            found = self._found[name] = {}
            for line in self._lines[name]:
                match = _INSTRUCTION.match(line)
                if match:
                    made = _instruction(match.group(1), line[match.end() :])
                    found[made.name] = made
        return self._found[name]


def arrays(text):
    """Returns a list of `Array`, one for each array of a type."""
    return [Array(dtype, _ints(shape)) for dtype, shape in _ARRAY.findall(text)]


def _instruction(name, text):
    if text.startswith("("):
        end = _closing(text, 0) + 1
    else:
        end = text.find(" ")
    opcode = _OPCODE.match(text, end)
    if opcode is None:
        return Instruction(name, "", arrays(text), [], text)
    last = _closing(text, opcode.end() - 1)
    return Instruction(
        name,
        opcode.group(1),
        arrays(text[:end]),
        _NAME.findall(text[opcode.end() : last]),
        text,
    )


def _group_of_mesh(found):
    """Returns the first group of a collective over axes of a mesh, or `None`.

    Args:
        found: Match of `_GROUPS_MESH`, or `None`.
    """
    if found is None:
        return None
    axes = dict(_AXIS.findall(found.group(1)))
    over = re.findall(r"'([^']+)'", found.group(2))
    if ":" in found.group(2) or not set(over) <= set(axes):
        # Parts of axes.
        return None
    sizes = [int(size) for size in axes.values()]
    devices = np.arange(math.prod(sizes)).reshape(sizes)
    first = tuple(slice(None) if name in over else 0 for name in axes)
    return tuple(devices[first].flatten().tolist())


def _closing(text, start):
    """Returns the index of the parenthesis that closes the one at `start`."""
    depth = 0
    for match in re.finditer(r"[()]", text[start:]):
        depth += 1 if match.group() == "(" else -1
        if depth == 0:
            return start + match.start()
    return len(text)


def _ints(text):
    return tuple(int(part) for part in text.split(",") if part)
