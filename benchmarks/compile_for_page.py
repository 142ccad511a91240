"""Writes `compile_for.md` from the rows of `compile_for.json`."""

import textwrap

HEAD = """\
# Train steps compiled for accelerators that are not there

Written by `python benchmarks/compile_for.py` on {dates},
on 2 shared cores without an accelerator; {versions}.
Mixed bfloat16, Adam, sparse cross-entropy. Figures are of one device, in the
program that XLA compiled, by the law of two shallow models: 2 and 4 layers for
H100, 1 and 2 for TPUs, which take minutes to compile. Nothing is run.

## Collectives

In theory a dense block has 4 all-reduces in a step: after attention and after
the feed-forward network, and of the gradients of their inputs. A layer of
Whisper is a block of the encoder and one of the decoder, which has two
attentions. The table and the head are apart: they are part of "the rest". The
plan's numbers are those of `plan.collectives`, without the loss and the
metrics. GiB are of results."""

MEMORY_HEAD = """\
## Memory and time

The step is a lower limit (a roofline from published peak figures), `waits` the
share of it in which communication is not hidden, `beside` the number of
operations that run beside computations. The forecast is `plan.memory` with all
gradients, most of which these programs make after their peak; it is the same
for both targets. Other work ran beside the compilers."""

LAW_HEAD = """\
## The law against a third depth

By the law / compiled, and the difference."""

MAPS_HEAD = """\
## The plan against KerasHub's own layout maps

`get_layout_map` of the backbone in a `ModelParallel`, compiled in the same way.
The last column counts the variables that `plan.compare` names, by reason."""

MAPS_NOTES = (
    "Gemma: the map sends as much as the plan, in as many collectives.",
    "Llama 3: the map splits queries, keys and values along the hidden dim. On "
    "H100 the step with cuDNN's attention does not compile: \"Query, key and "
    'value should have same sharding". Without it, XLA splits the activations '
    "between layers along the hidden dim, gathers them before products, and "
    "adds up whole logits (3.9 GiB). It sends 2.3 times as much as with the "
    "plan and keeps 46 % more arguments, but has smaller norms and residual "
    "sums: the lower limit of the step is the same as with the plan without "
    "cuDNN's attention.",
)

# What differs from theory or from the plan, and why; read from the programs.
NOTES = (
    "Loss: where the head is split, 4 all-reduces that the plan leaves out: "
    "the maximum, the sum of the exponentials and the logit of the label, a "
    "number for each token, and the sum over all tokens.",
    "Metric: KerasHub's tasks have an accuracy. It gathers the best class of "
    "each device and its logit, if the head is split. Whisper is a plain "
    "`Model` here, without it.",
    "Otherwise the rest is the sum after the lookup of the table, and the sum "
    "of the gradient before the head. On H100 the first is of float32, as the "
    "plan says, on v5e of bfloat16.",
    "GPT-2 on v5e: one operation more, with 2 tensors of 64 bytes: counters of "
    "the random numbers of dropout, one for each example. It is the one model "
    "with dropout.",
    "ViT-L/16, Mixtral 8x7B: the plan leaves the head whole, as it is small "
    "beside all layers. So neither the loss nor the accuracy communicates.",
    "Gemma 3 12B: 2 of the 6 are gradients of the scales that normalize "
    "queries and keys, 1 KiB each: heads on all devices share them. The plan "
    "has them too.",
    "Mixtral 8x7B: the fifth is the gradient of the weights of the experts, 2 "
    "numbers for each token. The program adds up the experts in float32, the "
    "plan counts bfloat16: 128 MiB more in each layer.",
    "Mixtral 8x7B on v5e: experts are split, and XLA splits the router's "
    "softmax and top-k along with them: 11 all-reduces and 4 all-to-alls of a "
    "few numbers for each token, and 3 all-gathers of 128 KiB, in each layer. "
    "In all layers together they send about 40 MiB. Experts are added up in "
    "bfloat16 here.",
    "Whisper medium: each layer of the decoder has a gradient of the encoder's "
    "output. They are added up, and one all-reduce sums the result over the "
    "devices. It is part of the rest, and so is that of a convolution. Theory "
    "and the plan say the same.",
    "Llama 3 70B on 8 x 8: 5 of the 9 add up gradients over the replicas, some "
    "of them in one tensor. The plan counts a tensor for each of the 9 "
    "variables of a layer, in float32, where the program sends bfloat16.",
)


def text(results, theory):
    """Returns the page.

    Args:
        results: Dict of `"model/target"`, `"model/target/check"` or
            `"model/target/map"` to a row.
        theory: Dict of model to the all-reduces of a layer.
    """
    rows, checks, maps = {}, {}, {}
    for key, row in results.items():
        kind = key.rpartition("/")[2]
        group = {"check": checks, "map": maps}.get(kind, rows)
        key = key.removesuffix(f"/{kind}") if group is not rows else key
        group[tuple(key.rsplit("/", 1))] = row
    # The models in their order, the targets side by side.
    order = sorted(rows, key=lambda key: (list(theory).index(key[0]), key[1]))
    rows = {key: rows[key] for key in order}
    found = [
        HEAD.format(dates=dates(results), versions=versions(results)),
        table(COLLECTIVES, [collectives(*i, theory) for i in rows.items()]),
        bullets(NOTES),
        MEMORY_HEAD,
        table(MEMORY, [memory(*item) for item in rows.items()]),
    ]
    if checks:
        pairs = [law(key, rows[key], row) for key, row in checks.items()]
        found += [LAW_HEAD, table(LAW, pairs)]
    if maps:
        pairs = [of_map(key, rows[key], row) for key, row in maps.items()]
        rows = [row for pair in pairs for row in pair]
        found += [MAPS_HEAD, table(MAPS, rows), bullets(MAPS_NOTES)]
    return "\n\n".join(part for part in found if part) + "\n"


def dates(results):
    """Returns the days on which the rows were compiled."""
    return ", ".join(sorted({row["date"] for row in results.values()}))


def versions(results):
    """Returns the versions of the packages that compiled the rows."""
    found = {}
    for row in results.values():
        for package, version in row.get("versions", {}).items():
            found.setdefault(package, set()).add(version)
    return ", ".join(f"{k} {' and '.join(sorted(v))}" for k, v in found.items())


def table(headings, rows):
    """Returns a table of Markdown."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in lines)


def bullets(notes):
    """Returns sentences as a list of Markdown."""
    return "\n".join(
        textwrap.fill(f"- {note}", 80, subsequent_indent="  ") for note in notes
    )


def kinds(counts):
    """Returns counts of collectives as text."""
    found = [f"{count:g} {kind}" for kind, count in counts.items() if count]
    return ", ".join(found).replace("_", "-") or "none"


def gib(nbytes):
    """Returns bytes as GiB, with two decimals."""
    return f"{nbytes / 2**30:.2f}"


def sent(row, what="bytes"):
    """Returns the sum of one figure of all collectives."""
    return sum(found[what] for found in row["collectives"].values())


def place(row):
    """Returns the mesh, the target and the batch of a row."""
    length = row["sequence_length"]
    return (
        f"{row['mesh']['batch']} x {row['mesh']['model']} {row['target']}",
        str(row["batch_size"]) + (f" x {length}" if length else ""),
    )


COLLECTIVES = (
    "model",
    "mesh",
    "batch",
    "of a layer, in theory",
    "of a layer",
    "of the rest",
    "of all, plan",
    "compiled",
    "GiB, plan",
    "compiled",
)


def collectives(key, row, theory):
    """Returns a row of the table of collectives."""
    name, counts = key[0], row["collectives"]
    rest = {
        kind: found["count"] - row["depth"] * row["per_layer"].get(kind, 0)
        for kind, found in counts.items()
    }
    planned = row["plan"]["collectives"]
    return (
        name.partition(",")[0],
        *place(row),
        theory[name],
        kinds(row["per_layer"]),
        kinds(rest),
        kinds({kind: count for kind, (count, _) in planned.items()}),
        kinds({kind: found["count"] for kind, found in counts.items()}),
        gib(sum(nbytes for _, nbytes in planned.values())),
        gib(sent(row)),
    )


MEMORY = (
    "model",
    "mesh",
    "arguments + temporaries, GiB",
    "peak, GiB",
    "fits",
    "plan's forecast, GiB",
    "TFLOPs",
    "step, ms",
    "waits",
    "beside",
    "attention",
    "seconds to compile",
)


def memory(key, row):
    """Returns a row of the table of memory and time."""
    held = row["memory"]
    parts = [gib(held[kind]) for kind in ("arguments", "temporaries")]
    return (
        key[0].partition(",")[0],
        place(row)[0],
        " + ".join(parts),
        f"{gib(held['peak'])} of {gib(row['memory_limit'])}",
        "yes" if row["fits"] else "no",
        gib(row["plan"]["memory"]["total"]),
        f"{sum(row['flops'].values()) / 1e12:.1f}",
        f"{1000 * row['seconds']['step']:.0f}",
        f"{row['communication_share']:.0%}",
        f"{sent(row, 'beside')} of {sent(row, 'operations')}",
        row["attention_text"],
        f"{row['compile_seconds']:.0f}",
    )


LAW = (
    "model",
    "target",
    "layers",
    "collectives",
    "MiB sent",
    "MiB of arguments",
    "of temporaries",
    "peak",
    "TFLOPs",
)


def law(key, row, real):
    """Returns a row: by the law / compiled, and the difference."""

    def pair(get, unit, digits):
        left, right = get(row["checked"]) / unit, get(real) / unit
        return f"{left:{digits}} / {right:{digits}} ({left / right - 1:+.1%})"

    return (
        *key,
        real["depth"],
        pair(lambda r: sent(r, "count"), 1, ".0f"),
        pair(sent, 2**20, ".1f"),
        *(
            pair(lambda r, n=n: r["memory"][n], 2**20, ".0f")
            for n in ("arguments", "temporaries", "peak")
        ),
        pair(lambda r: sum(r["flops"].values()), 1e12, ".3f"),
    )


MAPS = (
    "model",
    "mesh",
    "layouts",
    "of a layer",
    "GiB sent",
    "step, ms",
    "waits",
    "arguments + temporaries, GiB",
    "worse in",
)


def of_map(key, plan, theirs):
    """Returns rows of a model: with the plan, and with KerasHub's map."""
    found = {}
    for path, message in theirs["worse"]:
        reason = message.partition(":")[0].partition(";")[0]
        found.setdefault(reason, []).append(path)
    worse = ", ".join(f"{len(v)}: {reason}" for reason, v in found.items())
    rows = {"plan": plan}
    without = ""
    if theirs["refused"]:
        without = ", without cuDNN's attention"
        rows[f"plan{without}"] = theirs["alike"]
    rows[f"KerasHub{without}"] = theirs
    return [
        (
            key[0],
            place(row)[0],
            layouts,
            kinds(row["per_layer"]),
            gib(sent(row)),
            f"{1000 * row['seconds']['step']:.0f}",
            f"{row['communication_share']:.0%}",
            " + ".join(
                gib(row["memory"][kind])
                for kind in ("arguments", "temporaries")
            ),
            (worse or "none") if row is theirs else "",
        )
        for layouts, row in rows.items()
    ]
