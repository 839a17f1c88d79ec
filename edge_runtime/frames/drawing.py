"""Frames as JPEG with results drawn in: boxes, outlines, masks, and lines of text for what has no place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gemel.models.labels.rle import decode_rle

if TYPE_CHECKING:
    import numpy as np

    from gemel.edge_runtime.events.zones import Polygon
    from gemel.edge_runtime.sinks.base import ResultMessage

JPEG_QUALITY, MASK_OPACITY = 80, 0.45
THUMBNAIL_WIDTH = 240
MIN_POINT_SCORE = 0.1
ZONE_COLOUR = (235, 235, 235)
MAX_LABEL_SHIFTS = 6
"""Places above and below its own that a label may move to."""
Rectangle = tuple[int, int, int, int]
COLOURS = ((255, 176, 0), (0, 158, 255), (122, 224, 122), (255, 110, 180), (190, 150, 255), (64, 224, 208))
"""RGB, readable on day and night pictures; the queries of a camera take them in turn."""


def draw_message(message: ResultMessage) -> bytes | None:
    """The JPEG of a result, None without an image."""
    image = message.image
    if image is None:
        return None
    return message.forms.get("jpeg", lambda: draw_results(image, [_drawable(message.record)]))


def draw_larger(message: ResultMessage, picture: np.ndarray) -> bytes:
    """The same over a larger picture (RGB uint8, H, W, 3) of the same view."""
    assert message.image is not None
    drawable = dict(_drawable(message.record))
    (height, width), (rows, columns) = picture.shape[:2], message.image.shape[:2]
    scales = (width / columns, height / rows) * 2
    drawable["detections"] = [
        {**one, "box": [side * scale for side, scale in zip(one["box"], scales, strict=True)]}
        for one in drawable.get("detections", ())
    ]
    return draw_results(picture, [drawable])


def draw_thumbnail(image: np.ndarray, record: Mapping[str, Any]) -> bytes:
    """The JPEG of an event's snapshot, at most THUMBNAIL_WIDTH pixels wide, with the box of its object."""
    import cv2

    height, width = image.shape[:2]
    scale = min(1.0, THUMBNAIL_WIDTH / width)
    small = cv2.resize(image, (round(width * scale), max(1, round(height * scale))), interpolation=cv2.INTER_AREA)
    box = record["after"]["snapshot"]["box"]
    if box:
        left, top, right, bottom = (round(scale * value) for value in box)
        cv2.rectangle(small, (left, top), (right, bottom), COLOURS[0], 2)
    return _encode(small)


def _drawable(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """A record of results; of an event the object of its snapshot."""
    snapshot = record["after"]["snapshot"] if "after" in record else None
    if snapshot is None:
        return record
    if not snapshot["box"]:
        return {"query": record["query"], "label": snapshot["label"], "score": snapshot["score"]}
    found = {"class": snapshot["label"], "score": snapshot["score"], "box": snapshot["box"]}
    return {"query": record["query"], "detections": [found]}


def draw_results(
    image: np.ndarray, records: Iterable[Mapping[str, Any]], zones: Sequence[tuple[str, Polygon]] = ()
) -> bytes:
    """The JPEG of a frame (RGB uint8, H, W, 3) with these result records, and zones in fractions of it, drawn in."""
    return _encode(draw_on(image, records, zones))


def _encode(image: np.ndarray) -> bytes:
    import cv2

    is_encoded, data = cv2.imencode(
        ".jpg", cv2.cvtColor(image, cv2.COLOR_RGB2BGR), (cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY)
    )
    if not is_encoded:
        raise ValueError(f"a frame of {image.shape} cannot be written as JPEG")
    return data.tobytes()


def draw_on(
    image: np.ndarray, records: Iterable[Mapping[str, Any]], zones: Sequence[tuple[str, Polygon]] = ()
) -> np.ndarray:
    """A copy of a frame (RGB uint8, H, W, 3) with these zones, and over them these result records, drawn in."""
    import cv2
    import numpy as np

    drawn = image.copy()
    size = max(0.4, min(drawn.shape[:2]) / 500)
    lines, taken = 0, list[Rectangle]()
    for name, polygon in zones:
        _outline(drawn, name, polygon, taken)
    for index, record in enumerate(records):
        colour = COLOURS[index % len(COLOURS)]
        several = [(one["class"], one["score"]) for one in record.get("labels", ())]
        for name, score in [(record["label"], record["score"])] if "label" in record else several:
            lines += 1
            text = f"{record['query']}: {name} {float(score):.2f}"
            _write(drawn, text, (6, lines * (round(22 * size) + 10)), size, colour, taken)
        for place, found in enumerate(record.get("segments", ())):
            _shade(drawn, found, COLOURS[(index + place) % len(COLOURS)], size, taken)
        for found in record.get("detections", ()):
            left, top, right, bottom = (round(float(value)) for value in found["box"])
            thick, polygons = max(1, round(2 * size)), found.get("polygons", ())
            for polygon in polygons:
                cv2.polylines(drawn, [np.array(polygon).round().astype(np.int32)], True, colour, thick, cv2.LINE_AA)
            if not polygons:
                cv2.rectangle(drawn, (left, top), (right, bottom), colour, thick)
            for x, y, score in found.get("points", ()):
                if score >= MIN_POINT_SCORE:
                    cv2.circle(drawn, (round(x), round(y)), max(2, round(3 * size)), colour, cv2.FILLED, cv2.LINE_AA)
            track = f"#{found['track']} " if "track" in found else ""
            text = f"{track}{found['class']} {float(found['score']):.2f}"
            _write(drawn, text, (left, max(12, top - 4)), size, colour, taken)
    return drawn


def _outline(image: np.ndarray, name: str, polygon: Polygon, taken: list[Rectangle]) -> None:
    """Draw a zone, and its name at its first point."""
    import cv2
    import numpy as np

    height, width = image.shape[:2]
    points = np.array([(x * (width - 1), y * (height - 1)) for x, y in polygon]).round().astype(np.int32)
    size = max(0.4, min(height, width) / 500)
    cv2.polylines(image, [points], True, ZONE_COLOUR, max(1, round(2 * size)), cv2.LINE_AA)
    left, top = points[0]
    at = min(int(left) + 4, width - 60), max(14, min(int(top) + round(18 * size), height - 6))
    _write(image, name, at, size, ZONE_COLOUR, taken)


def _shade(
    image: np.ndarray, segment: Mapping[str, Any], colour: Sequence[int], size: float, taken: list[Rectangle]
) -> None:
    """Tint the pixels of a segment, and write its class at their middle."""
    mask = decode_rle(segment["mask"]["counts"], tuple(segment["mask"]["size"]))
    if mask.shape != image.shape[:2] or not mask.any():
        return
    image[mask] = (image[mask] * (1 - MASK_OPACITY) + [MASK_OPACITY * value for value in colour]).astype(image.dtype)
    rows, columns = mask.nonzero()
    _write(image, str(segment["class"]), (int(columns.mean()), int(rows.mean())), size, colour, taken)


def _write(
    image: np.ndarray, text: str, at: tuple[int, int], size: float, colour: Sequence[int], taken: list[Rectangle]
) -> None:
    """Write a label at this place, or at the next below or above that no other label takes."""
    import cv2

    plain = text.encode("ascii", "replace").decode()  # OpenCV's font has no other letters
    (width, height), below = cv2.getTextSize(plain, cv2.FONT_HERSHEY_SIMPLEX, size, 1)
    left = max(2, min(at[0], image.shape[1] - width - 2))
    step, lowest = height + below + 4, image.shape[0] - below
    for shift in sorted(range(-MAX_LABEL_SHIFTS, MAX_LABEL_SHIFTS + 1), key=abs):
        base = at[1] - shift * step
        place = (left - 2, base - height - 3, left + width + 2, base + below)
        if height + 3 <= base <= lowest and not any(_overlap(place, other) for other in taken):
            break
    else:
        base = at[1]
        place = (left - 2, base - height - 3, left + width + 2, base + below)
    taken.append(place)
    cv2.rectangle(image, place[:2], place[2:], (24, 24, 24), cv2.FILLED)
    cv2.putText(image, plain, (left, base), cv2.FONT_HERSHEY_SIMPLEX, size, tuple(colour), 1, cv2.LINE_AA)


def _overlap(one: Rectangle, other: Rectangle) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
