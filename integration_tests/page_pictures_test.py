"""Pages in a browser: what their scripts do, and the pictures in docs/."""

import html
import re

import keras
import pytest
from keras import layers

from integration_tests import browsers
from integration_tests import html_pages
from integration_tests import page_pictures
from integration_tests import terminal_pictures
from integration_tests.slow_tests import SLOW
from keras_tp import distribution
from keras_tp.distribution.device_mesh import DeviceMesh
from keras_tp.distribution.tensor_layout import format_bytes

pytestmark = [
    pytest.mark.skipif(not SLOW, reason="KERAS_TP_SLOW=1 runs it"),
    pytest.mark.skipif(
        browsers.find() is None,
        reason="no browser of the Chromium family is installed",
    ),
    pytest.mark.skipif(
        keras.config.backend() != "jax", reason="the same on each backend"
    ),
]


def build():
    tokens = keras.Input((None,), dtype="int32")
    x = layers.Embedding(64, 32, name="words")(tokens)
    for k in range(3):
        y = layers.Dense(128, activation="gelu", name=f"up_{k}")(x)
        x = x + layers.Dense(32, name=f"down_{k}")(y)
    return keras.Model(tokens, x, name="net")


@pytest.fixture(scope="module")
def plan():
    devices = [f"tpu:{k}" for k in range(4)]
    mesh = DeviceMesh((2, 2), ["batch", "model"], devices)
    return distribution.plan_sharding(build, mesh)


@pytest.fixture(scope="module")
def page(plan, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "plan.html"
    plan.to_html(path)
    return path


def text_of(document, name):
    found = re.search(rf'id="ktp-{name}"[^>]*>([^<]*)<', document)
    return found[1]


def test_the_script_computes_what_the_plan_does(plan, page):
    found = browsers.document(
        page, "#batch=32&length=96&optimizer=sgd_momentum&target=v5e"
    )
    memory = plan.memory(32, 96, "sgd_momentum")
    assert text_of(found, "total") == format_bytes(memory["total"])
    for name in ("gradients", "slots", "activations"):
        value = re.search(rf'data-value="{name}">([^<]*)<', found)[1]
        assert value == format_bytes(memory[name])
    sent = sum(count.bytes for count in plan.collectives(32, 96).values())
    assert text_of(found, "sent") == format_bytes(sent)
    assert text_of(found, "verdict") == "of 16.00 GiB (Cloud TPU v5e)"
    # A batch that does not fit.
    found = browsers.document(page, "#batch=9999999&length=96&target=v5e")
    assert "does not fit in 16.00 GiB" in text_of(found, "verdict")
    assert 'class="verdict over"' in found


def test_the_first_step_is_the_one_of_the_file(page):
    before = html_pages.Page(page.read_text(encoding="utf-8"))
    found = browsers.document(page)
    for name in ("total", "sent", "verdict"):
        assert text_of(found, name) in before.text
    assert "disabled" not in re.search(r'<input id="ktp-batch[^>]*>', found)[0]


def hidden(document):
    tags = re.findall(r'<details class="row"[^>]*>', document)
    return [" hidden" in tag for tag in tags]


def test_search_and_keys(page):
    every = hidden(browsers.document(page))
    assert len(every) == 5 and not any(every)
    search = (
        "press('/'); document.activeElement.value = 'words row';"
        "document.activeElement.dispatchEvent(new Event('input'));"
    )
    found = browsers.after(page, search)
    assert hidden(found).count(False) == 1
    assert text_of(found, "count") == "1 of 5"
    assert not any(hidden(browsers.after(page, search + "press('Escape');")))
    at = "document.title = document.activeElement.innerText;"
    titles = [
        re.search("<title>(.*?)</title>", found, re.DOTALL)[1]
        for keys in ("j", "jj", "jjk")
        for found in [
            browsers.after(
                page, "".join(f"press('{key}');" for key in keys) + at
            )
        ]
    ]
    assert "words/embeddings" in titles[0]
    assert "up_[0-2]" in titles[1]
    assert titles[2] == titles[0]


def test_the_theme(page):
    assert 'data-theme="dark"' in browsers.after(page, "press('t');")
    assert 'data-theme="light"' in browsers.after(
        page, "press('t'); document.getElementById('ktp-theme').click();"
    )


@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_is_no_wider_than_the_screen(width, page, tmp_path):
    """In a frame: the window of a browser is not as narrow as a phone."""
    inside = html.escape(page.read_text(encoding="utf-8"))
    script = (
        "const frame = document.querySelector('iframe');"
        "frame.onload = () => {"
        "const inner = frame.contentDocument;"
        "inner.querySelectorAll('details').forEach((x) => { x.open = true; });"
        "const { scrollWidth, clientWidth } = inner.documentElement;"
        "document.title = `${frame.clientWidth} "
        "${scrollWidth <= clientWidth}`; };"
    )
    outer = tmp_path / "outer.html"
    outer.write_text(
        "<!doctype html><title>outer</title><body>"
        f"<iframe width='{width}' height='800' frameborder='0'></iframe>"
        f"<textarea hidden>{inside}</textarea><script>{script}"
        "frame.srcdoc = document.querySelector('textarea').value;</script>",
        encoding="utf-8",
    )
    found = browsers.document(outer)
    title = re.search("<title>(.*?)</title>", found)[1]
    assert title == f"{width} true"


def test_pictures(tmp_path):
    pytest.importorskip("keras_hub")
    pytest.importorskip("PIL")
    page_pictures.make(tmp_path)
    for name, (width, height, _) in page_pictures.SHOTS.items():
        data = (tmp_path / f"{name}.png").read_bytes()
        size = tuple(
            int.from_bytes(data[at : at + 4], "big") for at in (16, 20)
        )
        assert size == (width, height)
        assert 10_000 < len(data) < page_pictures.MOST
        # The pictures that are there are of this page.
        assert (page_pictures.FOLDER / f"{name}.png").is_file()
    # Text, so the same as in the folder.
    for name in ("dataflow", *terminal_pictures.NAMES):
        drawn = (tmp_path / f"{name}.svg").read_text()
        assert len(drawn) < terminal_pictures.MOST
        assert "http" not in drawn.replace("http://www.w3.org/2000/svg", "")
        kept = (page_pictures.FOLDER / f"{name}.svg").read_text()
        assert drawn == kept, name
