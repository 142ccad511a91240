"""Makes the pictures of pages in docs/pictures.

    KERAS_BACKEND=jax python integration_tests/page_pictures.py

It needs a browser of the Chromium family, and Pillow.
"""

import pathlib
import sys
import tempfile

from integration_tests import browsers
from keras_tp import distribution
from keras_tp.distribution.device_mesh import DeviceMesh

FOLDER = pathlib.Path(__file__).parent.parent / "docs" / "pictures"
# Name -> width, height, and whether it is dark.
SHOTS = {
    "plan_light": (1280, 1200, False),
    "plan_dark": (1280, 1200, True),
    "plan_phone_light": (390, 1500, False),
    "plan_phone_dark": (390, 1500, True),
}
# Bytes.
MOST = 150_000
_COLOURS = 255


def llama():
    """Builds a small Llama; its logits have weights of their own."""
    import keras_hub

    return keras_hub.models.LlamaBackbone(
        vocabulary_size=32000,
        num_layers=12,
        num_query_heads=12,
        num_key_value_heads=4,
        hidden_dim=768,
        intermediate_dim=2048,
    )


def plan():
    """Returns the plan that the pictures show."""
    mesh = DeviceMesh(
        (1, 4), ["batch", "model"], [f"gpu:{k}" for k in range(4)]
    )
    return distribution.plan_sharding(llama, mesh)


def make(folder):
    """Writes all pictures to a folder."""
    from PIL import Image

    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    made = plan()
    made.plot(folder / "dataflow.svg")
    with tempfile.TemporaryDirectory() as temporary:
        page = pathlib.Path(temporary) / "plan.html"
        made.to_html(page, batch_size=8, sequence_length=1024)
        for name, (width, height, is_dark) in SHOTS.items():
            path = folder / f"{name}.png"
            browsers.picture(page, path, width, height, is_dark)
            with Image.open(path) as image:
                small = image.convert("RGB").quantize(_COLOURS)
            small.save(path, optimize=True)


if __name__ == "__main__":
    make(sys.argv[1] if len(sys.argv) > 1 else FOLDER)
