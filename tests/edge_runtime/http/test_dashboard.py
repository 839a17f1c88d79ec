"""The dashboard in a real browser, as wide as a desk and a phone."""

from __future__ import annotations

import time
from typing import Any

import pytest

from gemel.edge_runtime.http.status import UpdateStatus
from tests.browser import page_of
from tests.edge_runtime.http.box import Box, camera, query, sink
from tests.edge_runtime.http.test_app import TOKEN, serve_box

TIMEOUT_MS = 60_000
COUNT_DRAWN = """() => {
  const image = document.querySelector(".camera img"), canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [image.naturalWidth, image.naturalHeight];
  const pen = canvas.getContext("2d");
  pen.drawImage(image, 0, 0);
  const { data } = pen.getImageData(0, 0, canvas.width, canvas.height);
  let count = 0;
  for (let at = 0; at < data.length; at += 4) count += data[at] > 200 && data[at + 1] > 130 && data[at + 2] < 90;
  return count;
}"""
"""The pixels of the first picture that have the colour of a result."""


def wait_for(page: Any, expression: str, value: object) -> None:
    """Wait until an expression has this value; the page's own policy lets no script evaluate strings."""
    deadline = time.monotonic() + TIMEOUT_MS / 1000
    while page.evaluate(expression) != value:
        assert time.monotonic() < deadline, page.evaluate(expression)
        page.wait_for_timeout(50)


@pytest.fixture
def box() -> Box:
    box = Box()
    box.add_frame("bridge-cars", 1, time.time())
    box.add_result(time.time())
    box.add_frame("gate-kind", 1, time.time(), shift=120)
    return box


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (360, "dark")])
def test_dashboard_shows_the_box(browser: Any, box: Box, width: int, scheme: str) -> None:
    with serve_box(box) as address, page_of(browser, width, scheme) as (page, wrong):
        page.goto(f"http://{address}/")
        page.wait_for_selector(".camera:nth-child(2) img[src]", timeout=TIMEOUT_MS)
        folded = page.evaluate("[...document.querySelectorAll('details')].map(one => !one.open)")
        assert folded == [False, *[width < 900] * 6], "a phone shows the cameras first"
        page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
        page.wait_for_selector("#age-curve canvas", timeout=TIMEOUT_MS)
        assert page.title() == "north-gate · Gemel" and page.text_content("#as-of").startswith("as of ")
        assert page.text_content("h1") == "north-gate" and page.text_content("#state") == "all well"
        assert "bridge-cars" in page.text_content("#queries") and "deadline 4, replaced 5" in page.text_content(
            "#queries"
        )
        assert "weights that queries share 34 MiB" in page.text_content("#budget-legend")
        assert "1 of 2 queries resident" in page.text_content("#budget-words")
        assert page.text_content(".results") == "bridge-cars: 1 × car"
        assert page.get_attribute(".camera a", "href") == "/api/cameras/bridge/frame.jpg?plain=1"
        events = page.text_content("#events")
        assert "car #7" in events and "goes on" in events and "left" in events
        assert page.get_attribute("#events a", "href") == "/api/events/f3a9c1-1/clip.mp4"
        pictures = "[...document.querySelectorAll('#events img')]"
        assert page.evaluate(f"Promise.all({pictures}.map(one => one.decode().then(() => one.naturalWidth)))") == [240]
        assert "full 3" in page.text_content("#sinks")
        assert all(
            words in page.text_content("#drift") for words in ("0.930", "its own weights again", "too few frames")
        )
        assert "4.8 MiB of frames kept" in page.text_content("#spool") and "busy 2" in page.text_content("#spool")
        assert page.evaluate("Promise.all([...document.querySelectorAll('.camera img')].map(one => one.decode()))") == [
            None,
            None,
        ]
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert page.evaluate(
            "[...document.querySelectorAll('.scroll')].every(one => one.scrollWidth <= one.clientWidth)"
        )
        assert wrong == []


def test_dashboard_shows_problems_as_text(browser: Any, box: Box) -> None:
    with serve_box(box) as address, page_of(browser) as (page, wrong):
        page.goto(f"http://{address}/")
        page.wait_for_selector(".camera img[src]", timeout=TIMEOUT_MS)
        name = "<img src=x onerror=alert(1)>"
        away = camera("gate", state="away", up=False, frame_age_s=90.0, error="the connection was refused")
        box.changes["cameras"] = [camera("bridge"), away]
        off = query("gate-kind", "gate", scheduled=False)
        box.changes["queries"] = [query(name, "bridge", failure="ValueError: <b>no</b>"), off]
        box.changes["sinks"] = [sink("mqtt", state="down", trouble="no answer", undelivered={"old": 9})]
        box.changes |= {"refused": "bundle: is cut", "bundle_fault": "b was changed in place"}
        box.changes["held_back"] = {"bridge-cars": "it answers otherwise"}
        box.changes["updates"] = UpdateStatus(
            state="refused", checked_at=None, trial=None, refused={}, trouble="the server stalls", why="it is cut",
            since=1.79e9, offered="0123",
        )  # fmt: skip
        page.wait_for_selector("text=8 to look at", timeout=TIMEOUT_MS)
        text = page.text_content("#troubles")
        assert "camera gate: away, newest frame 2 min old (the connection was refused)" in text
        assert "query bridge-cars keeps its old weights: it answers otherwise" in text
        assert "updates: the server stalls" in text and "update 0123 refused since" in text
        assert "Updates: refused · 0123, since" in page.text_content("#updates")
        assert "bundle: b was changed in place" in text and "the last reload was not applied: bundle: is cut" in text
        assert "sink mqtt: down (no answer)" in text and f"query {name}: ValueError: <b>no</b>" in text
        assert "off, by its hours or a person" in page.text_content(".camera.down")
        assert page.is_visible(".camera.down .mark") and page.query_selector("#queries img") is None and wrong == []


def test_dashboard_reports_a_lost_box(browser: Any, box: Box) -> None:
    with page_of(browser) as (page, _):
        with serve_box(box) as address:
            page.goto(f"http://{address}/")
            page.wait_for_selector("text=all well", timeout=TIMEOUT_MS)
        page.wait_for_selector("text=/the box says nothing since/", timeout=TIMEOUT_MS)
        assert page.evaluate("getComputedStyle(document.querySelector('main')).filter") == "grayscale(1)"


def test_dashboard_greys_a_frozen_box_and_says_since_when(browser: Any, box: Box) -> None:
    with serve_box(box) as address, page_of(browser) as (page, _):
        page.goto(f"http://{address}/")
        page.wait_for_selector("text=all well", timeout=TIMEOUT_MS)
        box.is_awake.clear()
        page.wait_for_selector("body.silent", timeout=TIMEOUT_MS)
        assert "the box says nothing since" in page.text_content("#state")
        box.is_awake.set()
        page.wait_for_selector("body:not(.silent) >> text=all well", timeout=TIMEOUT_MS)


def test_dashboard_enlarges_a_picture_hides_labels_and_filters_events(browser: Any, box: Box) -> None:
    with serve_box(box) as address, page_of(browser) as (page, wrong):
        page.goto(f"http://{address}/")
        page.wait_for_selector(".camera img[src]", timeout=TIMEOUT_MS)
        before = page.locator(".camera .view").first.bounding_box()["width"]
        page.click(".camera .view")
        assert page.locator(".camera .view").first.bounding_box()["width"] > 1.5 * before
        assert page.get_attribute(".camera .view", "aria-pressed") == "true"
        assert page.evaluate(COUNT_DRAWN) > 10
        page.uncheck("#labels")
        wait_for(page, COUNT_DRAWN, 0)
        page.fill("#filter", "lane #5")
        wait_for(page, "document.querySelectorAll('#events tr').length", 1)
        assert "car #5" in page.text_content("#events") and wrong == []


def test_dashboard_login_with_token(browser: Any, box: Box) -> None:
    with serve_box(box, "0.0.0.0", TOKEN) as address, page_of(browser) as (page, _):
        page.goto(f"http://{address}/")
        page.fill("#token", "not-the-token-at-all")
        page.click("button")
        page.wait_for_selector("text=That is not its token.", timeout=TIMEOUT_MS)
        page.fill("#token", TOKEN)
        page.click("button")
        page.wait_for_selector("text=all well", timeout=TIMEOUT_MS)
        assert page.evaluate("document.cookie") == ""


def test_dashboard_ages_ignore_browser_clock(browser: Any, box: Box) -> None:
    with serve_box(box) as address, page_of(browser) as (page, _):
        page.add_init_script("const told = Date.now; Date.now = () => told() + 3600e3")
        page.goto(f"http://{address}/")
        page.wait_for_selector("text=/result \\d+(\\.\\d)? m?s old/", timeout=TIMEOUT_MS)


def test_dashboard_says_overload_and_old_pictures(browser: Any, box: Box) -> None:
    slow = query("bridge-cars", "bridge", asked_fps=10.0, fps=4.9, dropped_share=0.51)
    box.changes |= {"overloaded": True, "dropped_share": 0.51, "queries": [slow]}
    away = camera("gate", state="away", up=False, frame_age_s=130.0, away_s=125.0)
    box.changes["cameras"] = [camera("bridge", frame_age_s=42.0, undecodable=1), away]
    with serve_box(box) as address, page_of(browser) as (page, wrong):
        page.goto(f"http://{address}/")
        page.wait_for_selector("text=overloaded · 1 more", timeout=TIMEOUT_MS)
        assert "51 % of the frames of the last minute" in page.text_content("#troubles")
        assert page.text_content(".camera.stale .mark") == "42.0 s old"
        assert page.text_content(".camera.down .mark") == "away for 2 min"
        assert "1 undecodable frame" in page.text_content(".camera.stale") and "of 1 query" in page.text_content("body")
        cells = {one.get_attribute("data-of"): one.text_content() for one in page.query_selector_all("#queries td")}
        assert (cells["results/s"], cells["lost, 1 min"]) == ("4.9 of 10.0", "51 %")
        page.wait_for_selector("#rate-curve canvas", timeout=TIMEOUT_MS)
        page.wait_for_selector("#dropped-curve canvas", timeout=TIMEOUT_MS)
        assert wrong == []
