"""The picture of the report in docs: its first screen, of the demo.

    gemel demo --out out/demo
    python -m tests.gemel.screenshot out/demo/report.html -o docs/report.png

Needs Chromium. The clips are rendered: no picture here shows a real place.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.browser import open_browser, page_of, save_small_png

WIDTH, MARGIN_PX = 1120, 20


def main() -> None:
    """Take it."""
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("report", type=Path, help="a report.html")
    given.add_argument("-o", "--out", type=Path, default=Path("docs/report.png"))
    args = given.parse_args()
    address = args.report.resolve().as_uri()
    with open_browser() as browser, page_of(browser, WIDTH, own=address) as (page, _):
        page.goto(address)
        first = page.query_selector("header").bounding_box()
        height = first["y"] + first["height"] + MARGIN_PX
        save_small_png(
            page.screenshot(clip={"x": 0, "y": 0, "width": WIDTH, "height": height}, full_page=True), args.out
        )


if __name__ == "__main__":
    main()
