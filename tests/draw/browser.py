"""A page in a real browser, without a window."""

import shutil
import subprocess
from pathlib import Path

import pytest

needs_browser = pytest.mark.skipif(not shutil.which("chromium"), reason="needs a browser")


def shown(page: str, script: str, folder: Path, width: int = 1280, *more: str) -> str:
    """The document that a browser makes, under more options, of a page and of a script at its end."""
    path = folder / "page.html"
    path.write_text(page.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8")
    quiet = ("disable-gpu", "disable-background-networking", "no-first-run", "disable-sync", "disable-component-update")
    options = [
        "headless",
        "no-sandbox",
        *quiet,
        f"window-size={width},900",
        f"user-data-dir={folder / 'profile'}",
        *more,
    ]
    command = ["chromium", *(f"--{option}" for option in options), "--dump-dom", path.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
