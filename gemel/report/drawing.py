"""Inline SVG in Python: shapes that lie in per cent of the width, so that a picture fits a phone as well as a desk.

Heights are pixels. Colours come from the page's style by class, so that they follow light, dark and paper. What is
`said` of a shape is shown when it is pointed at; all of it is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from markupsafe import Markup

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
