"""Every snippet of the README and of the guide runs."""

import os
import pathlib
import re
import subprocess
import sys

import keras
import pytest

from integration_tests import launching

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
# Pages in docs/guides are run by `guides_test.py`.
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS = re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL)
LAUNCH = "python -m keras_tp.launch --devices 4 train.py"
ENVIRONMENT = {
    **launching.environment(KERAS_BACKEND=keras.config.backend()),
    # `python` in a command is the one that runs the tests.
    "PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}",
}


def run(command, folder):
    result = subprocess.run(
        command,
        env=ENVIRONMENT,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Warning" not in result.stderr, result.stderr
    return result.stdout


def snippets():
    """Yields a name and the text of each snippet, such as `README-0`."""
    for page in PAGES:
        found = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
        for index, text in enumerate(found):
            yield f"{page.stem}-{index}", text


SNIPPETS = dict(snippets())
FIRST = "README-0"


@pytest.mark.parametrize("name", [name for name in SNIPPETS if name != FIRST])
def test_snippet_runs(name, tmp_path):
    (tmp_path / "train.py").write_text(SNIPPETS[name])
    run(LAUNCH.split(), tmp_path)


def test_first_snippet_runs_by_the_command_beside_it(tmp_path):
    assert "Save this as `train.py`" in README
    (tmp_path / "train.py").write_text(SNIPPETS[FIRST])
    (command,) = COMMANDS
    name, _, rest = command.strip().partition(" ")
    assert (name, rest) == ("KERAS_BACKEND=jax", LAUNCH)
    # Whichever backend is tested.
    out = run(LAUNCH.split(), tmp_path)
    assert "'all_reduce': (count=1, bytes=8192)" in out
    assert "'all_gather': (count=0, bytes=0)" in out
    assert "(None, 'model')" in out


def test_the_two_commands_are_there():
    for name in re.findall(r"^    bash (shell/\w+\.sh)", README, re.MULTILINE):
        assert (ROOT / name).is_file()
    assert "bash shell/test.sh" in (ROOT / ".ci" / "run").read_text()


def test_links_lead_to_files():
    folders = (".", "docs", "docs/guides", "docs/api", "examples")
    pages = [page for name in folders for page in (ROOT / name).glob("*.md")]
    assert set(PAGES) < set(pages)
    for page in pages:
        for link in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / link).exists(), (page, link)
