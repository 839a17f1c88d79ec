"""Pages in a real browser: Debian's Chromium, driven by Playwright; and pictures of them that are small."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]  # fmt: skip
COLOURS = 160
LOOPBACK = "http://127.0.0.1:"


@contextmanager
def open_browser() -> Iterator[Any]:
    """The browser; skips, saying so, where it or what drives it is absent."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip("no Chromium is installed here")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed here")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=found, args=FLAGS)
        yield opened
        opened.close()


@contextmanager
def page_of(
    browser: Any, width: int = 1280, scheme: str = "light", own: str = LOOPBACK
) -> Iterator[tuple[Any, list[str]]]:
    """A new page, and what went wrong on it: errors of scripts, refused requests, those to anything but its `own`."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page, wrong = context.new_page(), list[str]()
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    allowed = (own, "data:", "blob:")
    page.on("request", lambda asked: wrong.append(asked.url) if not asked.url.startswith(allowed) else None)
    try:
        yield page, wrong
    finally:
        context.close()


def save_small_png(data: bytes, path: Path, texts: Mapping[str, str] | None = None) -> None:
    """The picture, a PNG, in few colours, which is small; `texts` are stored in it."""
    stored = PngInfo()
    for name, text in (texts or {}).items():
        stored.add_text(name, text)
    image = Image.open(io.BytesIO(data)).convert("RGB")
    image.quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True, pnginfo=stored)
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")
