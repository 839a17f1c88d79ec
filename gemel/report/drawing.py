"""Inline SVG in Python: shapes that lie in per cent of the width, so that a picture fits a phone as well as a desk.

Heights are pixels. Colours come from the page's style by class, so that they follow light, dark and paper. What is
`said` of a shape is shown when it is pointed at; all of it is escaped.

Accuracy on the stream over memory, a line for each arm: inline SVG.

The boxes of one model on an example frame, and the objects that it should have found: inline SVG over the photo.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from markupsafe import Markup

from gemel.text import number, size

TRACK_PX, BAR_PX = 22, 13


def picture(height: int, shapes: Iterable[Markup], kind: str = "", said: str = "") -> Markup:
    """A drawing of this height over all the width there is; one that says nothing is hidden from who listens."""
    told = Markup('role="img" aria-label="{}"').format(said) if said else Markup('aria-hidden="true"')
    head = Markup('<svg class="{}" width="100%" height="{}" {}>').format(kind, height, told)
    return head + Markup("").join(shapes) + Markup("</svg>")


def track(*shapes: Markup, said: str = "") -> Markup:
    """A thin line from end to end, with what lies on it."""
    return picture(TRACK_PX, [rect(0, 100, "rail", y="8", height="6"), *shapes], "track", said)


def bar(parts: Iterable[tuple[str, float, str]], height: int = BAR_PX, said: str = "") -> Markup:
    """Parts one after the other: (class, per cent of the width, what is said of it) each."""
    shapes, at = list[Markup](), 0.0
    for kind, width, told in parts:
        shapes.append(rect(at, width, kind, told))
        at += width
    return picture(height, shapes, "bar", said)


def rect(x: float, width: float, kind: str, said: str = "", y: str = "0", height: str = "100%") -> Markup:
    """A rectangle from `x`; what is too narrow to be seen is a pixel wide all the same, by the style."""
    shape = Markup('<rect class="{}" x="{}%" width="{}%" y="{}" height="{}"')
    return shape.format(kind, _short(x), _short(width), y, height) + _ended("rect", said)


def reach(low: float, high: float, kind: str) -> Markup:
    """The stretch of a track between two places."""
    return rect(low, high - low, f"reach {kind}", y="8", height="6")


def dot(x: float, kind: str, said: str = "", y: float = TRACK_PX / 2) -> Markup:
    """A point."""
    shape = Markup('<circle class="{}" cx="{}%" cy="{}" r="6"')
    return shape.format(kind, _short(x), _short(y)) + _ended("circle", said)


def tick(x: float, kind: str, said: str = "") -> Markup:
    """A mark across a track."""
    return line((x, 1), (x, TRACK_PX - 1), f"tick {kind}", said)


def line(start: tuple[float, float], end: tuple[float, float], kind: str, said: str = "") -> Markup:
    """A line between two places (per cent, pixels)."""
    shape = Markup('<line class="{}" x1="{}%" y1="{}" x2="{}%" y2="{}"')
    return shape.format(kind, _short(start[0]), _short(start[1]), _short(end[0]), _short(end[1])) + _ended("line", said)


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "middle") -> Markup:
    """Words that begin, are centred or end at a place."""
    shape = Markup('<text class="{}" x="{}%" y="{}" text-anchor="{}">{}</text>')
    return shape.format(kind, _short(x), _short(y), anchor, words)


def rows_of(places: Sequence[float], apart: float) -> list[int]:
    """For each label at a place (rising) the first row in which it is so far from the one before."""
    last: list[float] = []
    found = []
    for place in places:
        row = next((row for row, before in enumerate(last) if place - before >= apart), len(last))
        last[row:] = [place, *last[row + 1 :]]
        found.append(row)
    return found


def _ended(name: str, said: str) -> Markup:
    return Markup("><title>{}</title></{}>").format(said, name) if said else Markup("/>")


def _short(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


CURVE_PX, TOP_PX, LABEL_PX = 220, 18, 16
LEFT, RIGHT = 9.0, 93.0
"""Where the least and the largest memory lie, in per cent of the width."""
LABELS_APART = 25.0
"""Per cent between two labels of one row, so that they stand apart on a phone."""
GRID = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


@dataclass(frozen=True)
class Series:
    """One line: `points` are (memory in bytes, accuracy, the least and the largest over seeds), `kind` its class."""

    name: str
    kind: str
    points: Sequence[tuple[int, float, float, float]]


def draw_curve(
    series: Sequence[Series], settings: Mapping[int, str], level: tuple[str, float] | None = None
) -> Markup | None:
    """The picture, None where there is nothing to draw.

    `settings` names the bytes of memory that were played; `level` (name, accuracy) is drawn across.
    """
    if not settings or not any(one.points for one in series):
        return None
    low, high = min(settings), max(settings)

    def x(nbytes: int) -> float:
        return LEFT + (RIGHT - LEFT) * (nbytes - low) / (high - low) if high > low else (LEFT + RIGHT) / 2

    def y(accuracy: float) -> float:
        return TOP_PX + (1 - min(1.0, max(0.0, accuracy))) * (CURVE_PX - TOP_PX)

    shapes: list[Markup] = []
    for value in GRID:
        shapes.append(line((0, y(value)), (100, y(value)), "grid"))
        shapes.append(text(0, y(value) - 3, f"{value:g}", "soft", "start"))
    if level is not None:
        shapes.append(line((0, y(level[1])), (100, y(level[1])), "level", f"{level[0]}: {number(level[1], 2)}"))
    for one in series:
        ends = [(x(nbytes), y(accuracy)) for nbytes, accuracy, _, _ in one.points]
        shapes += [line(start, end, f"path {one.kind}") for start, end in pairwise(ends)]
        for (nbytes, accuracy, least, most), (across, down) in zip(one.points, ends, strict=True):
            told = f"{one.name}, {size(nbytes)}: {number(accuracy, 2)} ({number(least, 2)} to {number(most, 2)})"
            shapes.append(line((across, y(least)), (across, y(most)), f"spread {one.kind}"))
            shapes.append(dot(across, one.kind, told, down))
            if len(series) == 2:  # of more, the figures would stand in each other's way
                above = one is max(series, key=lambda line: _at(line, nbytes))
                place = down - 11 if above else down + 20
                shapes.append(text(across, place, number(accuracy, 2), f"value {one.kind}"))
    return _labelled(shapes, [(x(nbytes), name, nbytes) for nbytes, name in sorted(settings.items())])


def _at(series: Series, nbytes: int) -> float:
    """The accuracy of a line at one memory setting."""
    return next((accuracy for at, accuracy, _, _ in series.points if at == nbytes), 0.0)


def _labelled(shapes: list[Markup], settings: Sequence[tuple[float, str, int]]) -> Markup:
    """The picture with the memory settings named below, in as many rows as they need."""
    rows = rows_of([place for place, _, _ in settings], LABELS_APART)
    for (place, name, nbytes), row in zip(settings, rows, strict=True):
        shapes.append(line((place, CURVE_PX), (place, CURVE_PX + 4), "grid"))
        down = CURVE_PX + LABEL_PX * (2 * row + 1) + 2
        shapes.append(text(place, down, name))
        if name.replace(" ", "") != size(nbytes).replace(" ", ""):
            shapes.append(text(place, down + LABEL_PX - 2, size(nbytes), "soft"))
    height = CURVE_PX + 2 * LABEL_PX * (max(rows, default=0) + 1) + 6
    return picture(height, shapes, "curve", "accuracy on the stream over memory")


LINE_SHARE, TEXT_SHARE = 180, 26
"""Width of the frame over that of a line, and over the height of letters."""
MAX_LETTERS = 24


def draw_boxes(example: Mapping[str, Any], arm: str, several: bool) -> Markup:
    """What lies over the photo: the truth in thin white, what this model missed in red, its boxes in its colour.

    A false alarm is dashed. With `several` classes each box is named.
    """
    width, height = example["width"], example["height"]
    shapes = [_outlined(one["box"], "truth" if arm in one["found"] else "missed") for one in example["truth"]]
    for one in example[arm]:
        shapes.append(_outlined(one["box"], arm if one["right"] else f"{arm} alarm"))
    if several:
        shapes += [_named(one, "missed", width) for one in example["truth"] if arm not in one["found"]]
        shapes += [_named(one, arm, width) for one in example[arm]]
    head = Markup('<svg viewBox="0 0 {} {}" preserveAspectRatio="none" style="--thick: {}px; --letters: {}px">')
    return (
        head.format(width, height, _short_boxes(width / LINE_SHARE), _short_boxes(width / TEXT_SHARE))
        + Markup("").join(shapes)
        + Markup("</svg>")
    )


def _outlined(box: list[float], kind: str) -> Markup:
    """A box twice: dark and wide below, so that it is seen on any ground."""
    x0, y0, x1, y1 = box
    shape = Markup('<rect class="{}" x="{}" y="{}" width="{}" height="{}"/>')
    at = [_short_boxes(value) for value in (x0, y0, max(0.0, x1 - x0), max(0.0, y1 - y0))]
    return shape.format("under", *at) + shape.format(kind, *at)


def _named(one: Mapping[str, Any], kind: str, width: float) -> Markup:
    x0, y0, _, _ = one["box"]
    name = one["class"] if len(one["class"]) <= MAX_LETTERS else f"{one['class'][: MAX_LETTERS - 1]}…"
    letters = width / TEXT_SHARE
    down = y0 - letters / 4 if y0 > 1.4 * letters else y0 + letters
    shape = Markup('<text class="{}" x="{}" y="{}">{}</text>')
    return shape.format(kind, _short_boxes(max(0.0, x0)), _short_boxes(down), name)


def _short_boxes(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
