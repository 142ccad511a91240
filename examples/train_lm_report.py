"""The summary that `train_lm.py` ends with, and the files beside it."""

import keras
import numpy as np

# All-reduces of a cross-entropy of logits whose vocabulary is split, which
# depend on the backend: the table in docs/plans.md.
LOSS = {"jax": 4, "tensorflow": 3, "torch": 4}
# The embedding is used twice, as the logits are computed from it. The plan
# has one sum of its gradient over the replicas, and a backend more.
TIED_EMBEDDING = {"jax": 1, "tensorflow": 1, "torch": 2}


def predicted_all_reduces(plan, batch_size, length):
    """Predicts the all-reduces of a train step.

    Args:
        plan: `ShardingPlan` of the model.
        batch_size: Int.
        length: Int, length of a sequence.

    Returns:
        Dict of a cause to a count: what is in the plan, and what a plan
        leaves out.
    """
    backend = keras.config.backend()
    counts = plan.collectives(batch_size, length)
    found = {"in the plan": counts["all_reduce"].count}
    data, model = plan.device_mesh.shape
    if model > 1:
        found["loss over a split vocabulary"] = LOSS[backend]
        if backend == "jax" and "cpu" in str(plan.device_mesh.devices[0]):
            # The gradients of queries, keys and values have one input.
            found["XLA on CPUs sums gradients one by one"] = sum(
                row.terms - 1 for row in plan.reductions
            )
    if data > 1:
        found["mean of the loss"] = 1
        found["embedding used twice"] = TIED_EMBEDDING[backend]
    return {cause: count for cause, count in found.items() if count}


def sparks(values, width=40):
    """Returns a line of characters whose heights are those of the values."""
    parts = np.array_split(values, min(width, len(values)))
    means = [np.mean(part) for part in parts]
    low, high = min(means), max(means)
    scale = 7 / (high - low) if high > low else 0
    return "".join("▁▂▃▄▅▆▇█"[round((mean - low) * scale)] for mean in means)


def summary(result, report, folder):
    """Returns the lines that a run ends with.

    Args:
        result: Dict, what `train_lm.py` measured.
        report: `ShardingReport` of the model.
        folder: Path, where the page and the table are.
    """
    losses = result["losses"]
    some = np.unique(np.linspace(1, len(losses), 6).astype(int))
    curve = ", ".join(f"{losses[step - 1]:.2f} ({step})" for step in some)
    most = max(report.device_bytes.values()) / 2**20
    counts = result["collectives"]
    causes = result["predicted_all_reduces"]
    sent = sum(pair.bytes for pair in counts.values()) / 2**20
    others = sum(
        pair.count for name, pair in counts.items() if name != "all_reduce"
    )
    rows = [
        ("loss (step)", curve),
        ("", sparks(losses)),
        (
            "held-out files",
            f"{result['val_loss']:.4f} nats per byte; without context at least "
            f"{result['unigram_entropy']:.4f}",
        ),
        ("time", f"{result['seconds']:.0f} s of training"),
        (
            "memory",
            f"{most:.2f} MiB on each device; one device alone would hold "
            f"{report.total_bytes / 2**20:.2f}",
        ),
        (
            "all-reduces",
            f"{counts['all_reduce'].count} counted in a step, "
            f"{sum(causes.values())} predicted; {sent:.2f} MiB",
        ),
        *(("", f"{count:5} {cause}") for cause, count in causes.items()),
        ("others", f"{others} counted, 0 predicted"),
        *(
            ("text" if row == 0 else "", repr(bytes(text).decode("latin-1")))
            for row, text in enumerate(result["samples"])
        ),
        ("plan", f"{folder / 'plan.html'} (open it in a browser)"),
        ("table", f"{folder / 'sharding.txt'} (what each device holds)"),
        ("next", "docs/guides/get_started.md: your own model"),
    ]
    return "\n".join(f"{name:16}{text}".rstrip() for name, text in rows)
