"""Makes the notebooks in `examples/` from the scripts beside them.

A script has a `# %%` line before each cell, and its magics are comments. To
change a notebook, change its script, and then run its cells and write it:

    KERAS_TP_UPDATE_NOTEBOOKS=1 bash shell/test.sh \
        integration_tests/notebooks_test.py
    KERAS_TP_UPDATE_NOTEBOOKS=1 KERAS_BACKEND=torch bash shell/test.sh \
        integration_tests/notebooks_test.py
"""

import os
import pathlib
import sys
import tempfile

import jupyter_client
import jupytext
import nbclient
import nbformat

from integration_tests import launching

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def from_script(name):
    """Returns the notebook of a script, without outputs."""
    text = (EXAMPLES / f"{name}.py").read_text()
    cells = jupytext.reads(text, fmt="py:percent").cells
    notebook = nbformat.v4.new_notebook(metadata={"kernelspec": KERNEL})
    for index, cell in enumerate(cells):
        # Identifiers that are drawn would differ each time.
        notebook.cells.append({**cell, "id": f"cell-{index}", "metadata": {}})
    return nbformat.from_dict(notebook)


def stored(name):
    """Returns the notebook of a name, as it is in `examples/`."""
    return nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)


def write(name, notebook):
    """Writes a notebook to `examples/`."""
    notebook.metadata = {"kernelspec": KERNEL}
    nbformat.write(notebook, EXAMPLES / f"{name}.ipynb")


def run(notebook, folder, backend):
    """Runs all cells, in place; an error in a cell is an error.

    Args:
        notebook: Notebook.
        folder: Path, where the kernel runs.
        backend: String, name of the Keras backend.
    """
    variables = launching.environment(
        KERAS_BACKEND=backend,
        NO_COLOR="1",
        # `!python` in a cell is the one that runs the tests.
        PATH=f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}",
        IPYTHONDIR=str(folder / ".ipython"),
    )
    if backend == "jax":
        from keras_tp.backend.jax import distribution_lib

        # As the launcher sets them: XLA ends a process if a device is late, as
        # may be on a busy machine.
        flags = variables.get("XLA_FLAGS", "").split()
        for name, seconds in distribution_lib._XLA_CPU_FLAGS.items():
            flags.append(f"--{name}={seconds}")
        variables["XLA_FLAGS"] = " ".join(flags)
    # The kernel listens at files, not at ports; their paths have to be short.
    with tempfile.TemporaryDirectory() as sockets:
        manager = jupyter_client.AsyncKernelManager(
            kernel_name="python3", transport="ipc", ip=f"{sockets}/kernel"
        )
        nbclient.NotebookClient(
            notebook,
            km=manager,
            timeout=600,
            startup_timeout=300,
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": str(folder)}},
        ).execute(env=variables)


def output_of(notebook):
    """Returns the text of all outputs, without what went to stderr."""
    parts = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if output.output_type == "stream" and output.name == "stdout":
                parts.append(output.text)
            parts += map(str, output.get("data", {}).values())
    return "\n".join(parts)


def warnings_of(notebook):
    """Returns the text that went to stderr."""
    return "\n".join(
        output.text
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if output.output_type == "stream" and output.name == "stderr"
    )
