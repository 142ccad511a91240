"""Makes the pictures of pages and of terminals in docs/pictures.

    KERAS_BACKEND=jax python integration_tests/page_pictures.py

It needs a browser of the Chromium family, and Pillow.
"""

import json
import pathlib
import sys
import tempfile

from integration_tests import browsers
from integration_tests import terminal_pictures
from keras_tp import distribution
from keras_tp.distribution import accelerators
from keras_tp.distribution import compile_report
from keras_tp.distribution.device_mesh import DeviceMesh

ROOT = pathlib.Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "pictures"
PAGES = ("plan", "describe", "compile_for")
# End of the name -> width, height, and whether it is dark.
SCREENS = {
    "light": (1280, 1200, False),
    "dark": (1280, 1200, True),
    "phone_light": (390, 1500, False),
    "phone_dark": (390, 1500, True),
}
SHOTS = {
    f"{page}_{end}": screen for page in PAGES for end, screen in SCREENS.items()
}
# Bytes.
MOST = 150_000
_COLOURS = 255
# A report that was compiled in `benchmarks/compile_for.py`.
_COMPILED = "Llama 3 8B/h100"


def llama(**sizes):
    """Builds a small Llama; its logits have weights of their own."""
    import keras_hub

    sizes = {
        "vocabulary_size": 32000,
        "num_layers": 12,
        "num_query_heads": 12,
        "num_key_value_heads": 4,
        "hidden_dim": 768,
        "intermediate_dim": 2048,
        **sizes,
    }
    return keras_hub.models.LlamaBackbone(**sizes)


def plan():
    """Returns the plan that the pictures show."""
    mesh = DeviceMesh(
        (1, 4), ["batch", "model"], [f"gpu:{k}" for k in range(4)]
    )
    return distribution.plan_sharding(llama, mesh)


def described():
    """Returns the report of a model of the same shape on four devices."""
    devices = distribution.list_devices()[:4]
    mesh = DeviceMesh((1, 4), ["batch", "model"], devices)
    with distribution.TensorParallel(mesh).scope():
        model = llama(
            vocabulary_size=8000, hidden_dim=192, intermediate_dim=512
        )
        model.compile("adam", "mse")
        model.optimizer.build(model.trainable_variables)
    return distribution.describe(model)


def compiled():
    """Returns a report of `compile_for` from its figures in benchmarks/."""
    text = (ROOT / "benchmarks" / "compile_for.json").read_text()
    row = json.loads(text)[_COMPILED]
    return compile_report.CompileReport(
        f"{row['model']}, {row['depth']} layers",
        accelerators.accelerator(row["target"]),
        row["mesh"],
        row["batch_size"],
        row["sequence_length"],
        {None: row},
        memory_limit=row["memory_limit"],
    )


def make(folder):
    """Writes all pictures to a folder."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    made = plan()
    made.plot(folder / "dataflow.svg")
    reports = {"describe": described(), "compile_for": compiled()}
    terminal_pictures.make(folder, made, **reports)
    with tempfile.TemporaryDirectory() as temporary:
        pages = {
            name: pathlib.Path(temporary) / f"{name}.html" for name in PAGES
        }
        made.to_html(pages["plan"], batch_size=8, sequence_length=1024)
        for name, report in reports.items():
            report.to_html(pages[name])
        for name, page in pages.items():
            for end, (width, height, is_dark) in SCREENS.items():
                path = folder / f"{name}_{end}.png"
                browsers.picture(page, path, width, height, is_dark)
                _shrink(path)


def _shrink(path):
    from PIL import Image

    with Image.open(path) as image:
        small = image.convert("RGB").quantize(_COLOURS)
    small.save(path, optimize=True)


if __name__ == "__main__":
    import jax

    # For the model of `describe`.
    jax.config.update("jax_num_cpu_devices", 4)
    make(sys.argv[1] if len(sys.argv) > 1 else FOLDER)
