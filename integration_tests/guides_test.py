"""The guides run, their figures are true, and the site is complete."""

import ast
import os
import pathlib
import re
import subprocess
import sys

import keras
import pytest
from keras import layers

import keras_tp
from integration_tests import launching
from keras_tp import distribution
from keras_tp.distribution.planning import dim_groups
from keras_tp.distribution.planning import solver
from keras_tp.distribution.planning import trace

ROOT = pathlib.Path(__file__).parent.parent
DOCS = ROOT / "docs"
GUIDES = {page.stem: page.read_text() for page in DOCS.glob("guides/*.md")}
# torch's DTensor warns of arrays of one number, as KerasHub makes them in
# `generate`.
NO_FAULT = "UserWarning: Found a non-scalar tensor with numel=1"
once = pytest.mark.skipif(
    keras.config.backend() != "jax", reason="the same on each backend"
)


def script_of(text):
    """Returns the Python blocks of a page, which are one script."""
    return "\n\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))


@pytest.mark.parametrize("name", sorted(GUIDES))
def test_guide_runs(name, tmp_path):
    text = GUIDES[name]
    assert "`train.py`" in text
    backend = keras.config.backend()
    (tmp_path / "train.py").write_text(script_of(text))
    # The command that the page gives, for this backend.
    command = re.search(
        r"KERAS_BACKEND=jax (python -m keras_tp.launch --devices \d train.py)",
        text,
    )[1]
    result = subprocess.run(
        [sys.executable, *command.split()[1:]],
        cwd=tmp_path,
        env=launching.environment(KERAS_BACKEND=backend),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    errors = result.stderr.replace(NO_FAULT, "")
    assert "Warning" not in errors, errors


def messages():
    """Yields the strings of the package, `\\0` for each value put in."""
    for path in (ROOT / "keras_tp").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.JoinedStr):
                yield "".join(
                    part.value if isinstance(part, ast.Constant) else "\0"
                    for part in node.values
                )


@once
def test_messages_are_those_of_the_source():
    rows = re.findall(
        r"^\| (`.+?)(?= \(| \|)", GUIDES["troubleshooting"], re.MULTILINE
    )
    quoted = [row.strip("`") for row in rows]
    assert len(quoted) > 35
    source = list(messages())
    missing = []
    for fragment in quoted:
        parts = map(re.escape, fragment.split("..."))
        pattern = re.compile(".*?".join(parts), re.DOTALL)
        if not any(pattern.search(text) for text in source):
            missing.append(fragment)
    assert not missing


@once
def test_costs_that_the_guide_works_out():
    """The planner's own costs of the pair in `how_a_plan_is_chosen.md`."""

    def build():
        inputs = keras.Input((64,))
        x = layers.Dense(256, activation="gelu", name="up")(inputs)
        return keras.Model(inputs, layers.Dense(64, name="down")(x))

    planner = solver._Planner(trace.trace_build(build, None), 4, {}, True, True)
    found = {
        frozenset((path, dim) for path, dim, _ in members): (
            planner.cost[root] / dim_groups.EXAMPLES,
            planner._bytes({path for path, *_ in members}),
        )
        for root, members in planner.members.items()
    }
    hidden = frozenset({("up/kernel", 1), ("up/bias", 0), ("down/kernel", 0)})
    outputs = frozenset({("down/kernel", 1), ("down/bias", 0)})
    assert found == {hidden: (512, 132096), outputs: (1152, 65792)}
    text = GUIDES["how_a_plan_is_chosen"]
    assert "(hidden_cost, hidden_saving) == (512, 132096)" in text
    assert "(outputs_cost, outputs_saving) == (1152, 65792)" in text


@once
def test_every_page_is_in_the_table_of_contents():
    listed = set()
    for page in (DOCS / "index.md", DOCS / "api" / "index.md"):
        for block in re.findall(
            r"```\{toctree\}\n(.*?)```", page.read_text(), re.DOTALL
        ):
            # A path alone, or `title <path>`.
            for path in re.findall(r"^(?!:)(?:.*<)?(.+?)>?$", block, re.M):
                listed.add((page.parent / f"{path}.md").resolve())
    pages = {page for page in DOCS.rglob("*.md") if "_build" not in page.parts}
    assert pages - listed == {DOCS / "index.md"}
    assert all(page.is_file() for page in listed)


@once
def test_the_reference_has_every_public_name():
    text = "\n".join(page.read_text() for page in DOCS.glob("api/*.md"))
    documented = set(re.findall(r"auto(?:class|function):: ([\w.]+)", text))
    names = {
        f"keras_tp.distribution.{name}"
        for name, value in vars(distribution).items()
        if not name.startswith("_") and callable(value)
    }
    names |= {
        f"keras_tp.{name}" for name, v in vars(keras_tp).items() if callable(v)
    }
    assert len(names) > 20
    assert names <= documented


@once
@pytest.mark.slow
def test_the_site_builds_without_a_warning():
    """It needs pip, to make an environment."""
    result = subprocess.run(
        ["bash", "shell/docs.sh", "-E"],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    site = DOCS / "_build" / "html"
    assert (site / "index.html").is_file()
    for name in GUIDES:
        assert (site / "docs" / "guides" / f"{name}.html").is_file()
