"""Whether the region that a query looks at lies in a camera's picture."""

from __future__ import annotations

from edge_runtime.capture.settings import Wanted


def region_fault(query: str, wanted: Wanted, width: int, height: int) -> str | None:
    """What is wrong with a query's region in frames of so many pixels, if anything."""
    roi = wanted.roi
    if roi is None or (round(roi[0]) < width and round(roi[1]) < height):
        return None
    return f"query '{query}' looks at {list(roi)}, outside frames of {width}x{height} pixels"
