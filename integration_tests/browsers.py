"""Opens pages in a browser that is installed, without a window."""

import os
import pathlib
import re
import shutil
import subprocess
import tempfile

_NAMES = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
)
_TIMEOUT_S = 120


def find():
    """Returns the path of a browser of the Chromium family, or `None`.

    The environment variable `KERAS_TP_BROWSER` names another one.
    """
    named = os.environ.get("KERAS_TP_BROWSER")
    return named or next(filter(None, map(shutil.which, _NAMES)), None)


def document(page, address=""):
    """Returns the document of a page after its script has run.

    Args:
        page: Path-like, an HTML file.
        address: String, the end of its address, such as `"#batch=4"`.
    """
    url = f"{pathlib.Path(page).as_uri()}{address}"
    return _run(url, "--dump-dom", "--window-size=1400,900")


def picture(page, path, width, height, is_dark=False, address=""):
    """Writes a picture of the top of a page as a PNG.

    Args:
        page: Path-like, an HTML file.
        path: Path-like, the file to write.
        width: Int, pixels.
        height: Int, pixels.
        is_dark: Boolean. Whether the system is dark. Defaults to `False`.
        address: String, the end of its address. Defaults to an empty string.
    """
    _run(
        f"{pathlib.Path(page).as_uri()}{address}",
        f"--screenshot={path}",
        f"--window-size={width},{height}",
        "--hide-scrollbars",
        *["--force-dark-mode"] * is_dark,
    )


def after(page, script):
    """Returns the document of a page after a script of a test, too.

    Args:
        page: Path-like, an HTML file.
        script: String, which may call `press(key)`.
    """
    text = pathlib.Path(page).read_text(encoding="utf-8")
    press = (
        "const press = (key) => (document.activeElement || document.body)"
        ".dispatchEvent(new KeyboardEvent('keydown', "
        "{key, bubbles: true, cancelable: true}));"
    )
    # Nothing of the page may use the network.
    assert not re.search(r"(src|href)=", text)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "page.html"
        end = f"<script>{press}{script}</script></body>"
        path.write_text(text.replace("</body>", end), encoding="utf-8")
        return document(path)


def _run(address, *options):
    with tempfile.TemporaryDirectory() as folder:
        result = subprocess.run(
            [
                find(),
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--virtual-time-budget=2000",
                f"--user-data-dir={folder}",
                *options,
                address,
            ],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
        )
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout
