"""The picture of the report in docs: its first screen, of the demo.

    gemel demo --out out/demo
    python -m tests.gemel.screenshot out/demo/report.html -o docs/report.png

Needs Chromium. The clips are rendered: no picture here shows a real place. The picture holds its figures as text, which
a test compares with the record of the demo.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tests.browser import open_browser, page_of, save_small_png

WIDTH, MARGIN_PX = 1120, 20
FIGURES = "figures"


def read_figures(report: Path) -> dict[str, Any]:
    """What the first screen shows of the bytes, and of each query: original, merged, what is shown of the ratio."""
    document = json.loads(report.read_text(encoding="utf-8"))
    rows = {row["query"]: [row["original"], row["merged"], row["lower_end"]] for row in document["offline"]}
    return {"saved": document["bytes"]["saved_fraction"], "queries": rows}


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
            page.screenshot(clip={"x": 0, "y": 0, "width": WIDTH, "height": height}, full_page=True),
            args.out,
            {FIGURES: json.dumps(read_figures(args.report.with_suffix(".json")))},
        )


if __name__ == "__main__":
    main()
