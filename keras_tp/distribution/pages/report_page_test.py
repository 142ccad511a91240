import re

from integration_tests import html_pages
from keras_tp.distribution.pages import report_page
from keras_tp.distribution.report import ShardingReport
from keras_tp.distribution.report import VariableReport


def row(path, axes, parts=1, size=4096, slot_of="", role="weight", devices=2):
    held = {f"cpu:{k}": size // parts for k in range(devices)}
    why = "" if parts > 1 else "its <why>"
    return VariableReport(
        path, role, (32, 32), "float32", axes, size, held, why, slot_of
    )


def report(blocks=3):
    rows = [row("table/embeddings", (None, None), size=2**20)]
    for k in range(blocks):
        rows.append(row(f"block_{k}/up/kernel", (None, "model"), 2))
    for k in range(blocks):
        of = f"block_{k}/up/kernel"
        rows.append(
            row(f"adam/{k}_momentum", (None, "model"), 2, 4096, of, "slot")
        )
    return ShardingReport("a<b", rows)


def test_the_page_of_a_report():
    text = report_page.page(report())
    page = html_pages.Page(text)
    assert "table/ embeddings is whole on each device: 1.00 MiB" in page.text
    assert "Reason: its <why>" in page.text and "<why>" not in text
    rows = [tag for _, tag in page.attributes if "data-text" in tag]
    # Slots have no rows of their own.
    assert len(rows) == 2
    assert "3 x block_[0-2]/up" in page.text.replace("/ ", "/")
    assert "Optimizer slots on each device: 2.00 KiB" in page.text


def test_variables_below_repeated_layers_have_a_heading_of_their_own():
    made = report()
    rows = [*made.rows, row("norm/scale", (None,), size=64)]
    text = html_pages.Page(report_page.page(ShardingReport("net", rows))).text
    assert re.search(r"block_\[0-2\].* Other variables norm/ ?scale", text)
    assert "Other variables" not in report_page.page(made)


def test_a_stack_for_each_device():
    page = html_pages.Page(report_page.page(report()))
    widths = [
        tag["width"]
        for _, tag in page.attributes
        if tag.get("data-part") == "slot" and "width" in tag
    ]
    total = 2**20 + 6 * 2048
    assert widths == [f"{100 * 3 * 2048 / total:.3f}%"] * 2


def test_devices_that_hold_more():
    made = report()
    lone = row("lone/kernel", None, size=2**20, devices=1)
    uneven = ShardingReport("net", [*made.rows, lone])
    text = html_pages.Page(report_page.page(uneven)).text
    assert re.search(r"cpu:0 holds 2.01 MiB, cpu:1 only 1.01 MiB", text)


def test_a_piece_for_a_notebook():
    page = html_pages.Page(report()._repr_html_())
    assert "is whole on each device" in page.text
    assert "bar" in page.classes


def test_it_is_written_to_a_file(tmp_path):
    report().to_html(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text() == report_page.page(report())
