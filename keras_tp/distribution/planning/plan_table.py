"""A plan as a table, for a terminal."""

import io

from keras_tp.distribution.planning import plan_rows
from keras_tp.distribution.tensor_layout import format_bytes


def text_of(plan):
    """Returns the text of a plan: path, shape, layout, size, why.

    Args:
        plan: `ShardingPlan`.
    """
    # Imported late: only a printed plan needs it.
    from rich.console import Console
    from rich.table import Table

    mesh = plan.device_mesh
    table = Table(title=f"Sharding plan of {plan.model_name}")
    for heading in ("variable", "shape", "layout"):
        table.add_column(heading, overflow="fold")
    table.add_column("MiB per device", justify="right")
    table.add_column("why", overflow="fold")
    for row in plan.variables:
        table.add_row(
            row.path,
            str(row.shape),
            plan_rows.layout_text(row),
            f"{plan.device_bytes(row) / 2**20:.3f}",
            row.why,
        )
    text = io.StringIO()
    console = Console(file=text, width=120)
    console.print(table)
    total = sum(row.nbytes for row in plan.variables)
    held = sum(plan.device_bytes(row) for row in plan.variables)
    console.print(
        f"Mesh {dict(zip(mesh.axis_names, mesh.shape))}: each device holds "
        f"{format_bytes(held)} of {format_bytes(total)}; "
        f"{plan.split_share:.1%} of the matrices are split; "
        f"{len(plan.reductions)} sums over the devices in a training step."
    )
    for kind, path in plan.without_rule.items():
        console.print(
            f"No rule for {kind} (first in {path!r}): its inputs and "
            "outputs are not split."
        )
    return text.getvalue().rstrip()
