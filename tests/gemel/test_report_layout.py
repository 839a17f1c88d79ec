"""The page in a real browser: it fits a desk, a phone and paper, and asks for nothing that is not in the file."""

import base64
import json

import cv2
import numpy as np
import pytest

from gemel.report.document import Report
from gemel.report.page import render_report
from tests.browser import page_of

PHONE_PX = 640
A4_PX = 718
"""Of paper between usual margins, at 96 pixels an inch."""
_, JPEG = cv2.imencode(".jpg", np.full((9, 16, 3), 90, np.uint8))
PHOTO = base64.b64encode(JPEG.tobytes()).decode()
LONG = "a-query-on-the-camera-above-the-northern-gate" + "withaverylongname" * 5

# What is cut: it lies beyond the page, and nothing around it can be scrolled.
CUT = """() => [...document.querySelectorAll('body *')].filter(one => {
  const box = one.getBoundingClientRect();
  return box.width && (box.right > innerWidth + 1 || box.left < -1) && !one.closest('.scroll') && !one.closest('.shot');
}).map(one => one.tagName + '.' + (one.className.baseVal ?? one.className) + ': ' + one.textContent.slice(0, 40))"""

SCROLLED = """() => [...document.querySelectorAll('.scroll')].filter(one => one.scrollWidth > one.clientWidth + 1)
  .map(one => one.textContent.slice(0, 60))"""


@pytest.fixture
def open_page(browser, document, tmp_path):
    def open_at(width, scheme, text, media="screen"):
        path = tmp_path / "report.html"
        path.write_text(text)
        with page_of(browser, width, scheme, own=path.as_uri()) as (page, wrong):
            page.emulate_media(media=media, color_scheme=scheme)
            page.goto(path.as_uri())
            shown = page.evaluate("getComputedStyle(document.querySelector('.photo0')).backgroundImage")
            page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
            wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
            if width < PHONE_PX:
                assert page.evaluate(SCROLLED) == []
            return page.evaluate(CUT), wide, wrong, shown

    return open_at


@pytest.mark.parametrize(
    ("width", "scheme", "media"),
    [(1280, "light", "screen"), (390, "dark", "screen"), (A4_PX, "light", "print")],
)
def test_page_in_a_browser_cuts_and_requests_nothing(open_page, document, width, scheme, media):
    named = json.loads(json.dumps(document).replace("gate-people", LONG))
    named["offline"][1] |= {"met": False, "ratio": 0.9}
    for text in (render_report(Report.model_validate(one), [PHOTO] * 2) for one in (document, named)):
        cut, wide, wrong, shown = open_page(width, scheme, text, media)
        assert (cut, wide, wrong) == ([], 0, [])
        assert shown.startswith('url("data:image/jpeg')
