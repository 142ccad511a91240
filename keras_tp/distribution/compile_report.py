"""The report of a train step that was compiled for another machine."""

import json

from keras_tp.backend.saving import atomic_files
from keras_tp.distribution import compiled_step
from keras_tp.distribution.pages import compile_page
from keras_tp.distribution.planning import tables
from keras_tp.distribution.tensor_layout import format_bytes

# Of XLA's custom calls; without one of them, attention is matmuls and a
# softmax over a matrix of length x length.
NO_KERNEL = "none: matmuls and a softmax over length x length"


# Of `collective_headings`, for a terminal.
_SHORT_HEADINGS = (
    *("collective", "tensors", "operations", "bytes", "beside", "takes"),
    "hidden",
)
_HEADINGS_NOTE = (
    "`beside`: operations that run beside computations; `hidden`: the part of "
    "their time that computations hide."
)
# Outputs in the place of arguments take no memory of their own.
_NAMES = {"aliased": "in the place of arguments"}


class CompileReport:
    """What a compiled train step sends, holds and computes on one device.

    `compile_for` makes it. `print` shows a table. Sizes are in bytes, times in
    seconds.

    Args:
        model_name: String.
        accelerator: `Accelerator`.
        mesh: Dict of mesh axis to size.
        batch_size: Int, the global batch size.
        sequence_length: Int or `None`.
        compiled: Dict of the number of layers to the figures of
            `compiled_step.figures`. The key is `None` if the model itself was
            compiled.
        depth: Int, the number of layers to report, by the law of the two that
            were compiled. Defaults to `None`.
        compile_seconds: Float, what lowering and compiling took.
        memory_limit: Int, bytes that the compiler has for a program. Defaults
            to the memory of the accelerator.

    Attributes:
        collectives: Dict of name to a dict of `"count"` (tensors),
            `"operations"`, `"bytes"` (of the results), `"beside"` (those that
            run beside computations), `"seconds"` and `"hidden_seconds"`.
        memory: Dict of `"arguments"`, `"outputs"`, `"aliased"` (outputs in the
            place of arguments), `"temporaries"` and `"peak"`.
        flops: Dict of dtype to FLOPs of matmuls and convolutions.
        seconds: Dict of `"compute"`, `"matmul"`, `"communication"`,
            `"exposed"` (the communication that computations do not hide) and
            `"step"`: lower limits.
        attention: Dict of kernel to the number of its calls.
    """

    def __init__(
        self,
        model_name,
        accelerator,
        mesh,
        batch_size,
        sequence_length,
        compiled,
        depth=None,
        compile_seconds=0.0,
        memory_limit=None,
    ):
        self.model_name = model_name
        self.accelerator = accelerator
        self.mesh = dict(mesh)
        self.batch_size = batch_size
        self.sequence_length = sequence_length
        self.depth = depth
        self.compiled = dict(compiled)
        self.compile_seconds = compile_seconds
        self.memory_limit = memory_limit or accelerator.memory
        if depth is None:
            (figures,) = compiled.values()
        else:
            figures = compiled_step.at_depth(depth, *compiled.items())
        self.collectives = figures["collectives"]
        self.memory = figures["memory"]
        self.flops = figures["flops"]
        self.bytes = figures["bytes"]
        self.attention = figures["attention"]
        self.seconds = figures["seconds"]

    @property
    def compiled_depths(self):
        """The numbers of layers that were compiled; empty without a law."""
        return () if self.depth is None else tuple(self.compiled)

    def at_depth(self, depth):
        """Returns the report of another number of layers, by the same law."""
        if self.depth is None:
            raise ValueError(
                "The report is of one model. Pass `depth` to `compile_for` for "
                f"others. Received: depth={depth}"
            )
        return CompileReport(
            self.model_name,
            self.accelerator,
            self.mesh,
            self.batch_size,
            self.sequence_length,
            self.compiled,
            depth,
            self.compile_seconds,
            self.memory_limit,
        )

    def collectives_per_layer(self):
        """Returns a dict of name to the number of tensors of each layer."""
        (low, left), (high, right) = self.compiled.items()
        left, right = left["collectives"], right["collectives"]
        return {
            kind: (right[kind]["count"] - left.get(kind, {}).get("count", 0))
            / (high - low)
            for kind in right
        }

    @property
    def peak(self):
        """The most bytes that the step holds on one device."""
        return self.memory["peak"]

    @property
    def fits(self):
        """Whether the step fits in the memory of a device."""
        return self.peak <= self.memory_limit

    @property
    def communication_share(self):
        """Share of the step in which a device waits for communication."""
        step = self.seconds["step"]
        return self.seconds["exposed"] / step if step else 0.0

    def verdict(self):
        """Returns a sentence that says whether the step fits."""
        held, limit = (size / 2**30 for size in (self.peak, self.memory_limit))
        word = "fits" if self.fits else "does not fit"
        return f"{word} in {limit:.1f} GiB: {held:.1f} GiB"

    def title(self):
        """Returns the model, the accelerators and the batch."""
        count = 1
        for size in self.mesh.values():
            count *= size
        length = self.sequence_length
        batch = f"{self.batch_size}" + (f" x {length}" if length else "")
        layers = f", {self.depth} layers" if self.depth else ""
        mesh = " x ".join(f"{axis} {size}" for axis, size in self.mesh.items())
        return (
            f"{self.model_name}{layers} on {count} x {self.accelerator.title}, "
            f"mesh {mesh}; batch {batch}"
        )

    def notes(self):
        """Returns a list of sentences on how to read the figures."""
        found = []
        if self.compiled_depths:
            depths = " and ".join(map(str, self.compiled_depths))
            found.append(
                f"Compiled with {depths} layers; all figures are linear in "
                "the number of layers."
            )
        found.append(
            "Times are lower limits (a roofline) from published peak figures: "
            f"{self.accelerator.source}."
        )
        return found

    def rows(self):
        """Returns `(name, value)` pairs of strings, all but collectives."""
        seconds, memory = self.seconds, self.memory
        flops = ", ".join(
            f"{count / 1e12:.2f} T in {dtype}"
            for dtype, count in self.flops.items()
        )
        return [
            ("memory", self.verdict()),
            *(
                (f"  {_NAMES.get(name, name)}", format_bytes(memory[name]))
                for name in ("arguments", "outputs", "aliased", "temporaries")
                if name in memory
            ),
            ("FLOPs", flops or "0"),
            ("bytes read and written", format_bytes(self.bytes)),
            ("attention", self.attention_text()),
            ("step, at least", _milliseconds(seconds["step"])),
            ("  computations", _milliseconds(seconds["compute"])),
            ("  of them matmuls", _milliseconds(seconds["matmul"])),
            ("  communication", _milliseconds(seconds["communication"])),
            (
                "  of it not hidden",
                f"{_milliseconds(seconds['exposed'])}, "
                f"{self.communication_share:.1%} of the step",
            ),
        ]

    def attention_text(self):
        """Returns the kernels of attention and their number as text."""
        if not self.attention:
            return NO_KERNEL
        return ", ".join(
            f"{kernel} x {count}" for kernel, count in self.attention.items()
        )

    def collective_rows(self):
        """Returns a tuple of strings for each kind of collective."""
        return [
            (
                kind,
                str(row["count"]),
                str(row["operations"]),
                format_bytes(row["bytes"]),
                f"{row['beside']} of {row['operations']}",
                _milliseconds(row["seconds"]),
                _milliseconds(row["hidden_seconds"]),
            )
            for kind, row in self.collectives.items()
        ]

    collective_headings = (
        "collective",
        "tensors",
        "operations",
        "bytes",
        "run beside computations",
        "takes",
        "of it hidden",
    )

    def to_dict(self):
        """Returns the report as plain dicts and lists, ready for JSON."""
        return {
            "model": self.model_name,
            "target": self.accelerator.name,
            "mesh": self.mesh,
            "batch_size": self.batch_size,
            "sequence_length": self.sequence_length,
            "depth": self.depth,
            "compiled_depths": list(self.compiled_depths),
            "compile_seconds": self.compile_seconds,
            "memory_limit": self.memory_limit,
            "fits": self.fits,
            "memory": self.memory,
            "collectives": self.collectives,
            "flops": self.flops,
            "bytes": self.bytes,
            "attention": self.attention,
            "seconds": self.seconds,
            "communication_share": self.communication_share,
            "accelerator": self.accelerator._asdict(),
        }

    def to_json(self):
        """Returns the report as JSON."""
        return json.dumps(self.to_dict(), indent=1)

    def to_html(self, path):
        """Writes the report as one self-contained HTML page.

        Args:
            path: String or path-like, the file to write.
        """
        with atomic_files.replaced(path) as new:
            with open(new, "w", encoding="utf-8") as file:
                file.write(compile_page.page(self))

    def _repr_html_(self):
        return compile_page.piece(self)

    def __repr__(self):
        return f"<{self.__class__.__name__} {self.title()}: {self.verdict()}>"

    def __str__(self):
        figures = dict.fromkeys(("figure", "on one device"), tables.FOLD)
        kinds = dict.fromkeys(_SHORT_HEADINGS, tables.RIGHT)
        rows = [(*row, "") for row in self.collective_rows()]
        return "\n\n".join(
            [
                tables.listing(self.title(), figures, [("", self.rows())]),
                tables.listing(
                    *("Collectives", {**kinds, "": tables.FOLD}, [("", rows)]),
                    *(_HEADINGS_NOTE, *self.notes()),
                ),
            ]
        )


def _milliseconds(seconds):
    return f"{1000 * seconds:.2f} ms"
