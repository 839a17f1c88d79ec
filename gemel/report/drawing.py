"""Inline SVG: bars, tracks, the memory curve and detection boxes.

Widths are per cent of the picture, so that it fits a phone and a desktop; heights are pixels. Colours come from the
style sheet by class. A `label` is the tooltip of a shape; all text is escaped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup

from gemel.report.document import DetectionExample, PredictedBox, TrueBox
from gemel.report.geometry import Point
from gemel.text import number, size

TRACK_PX, BAR_PX = 22, 13
CURVE_PX, TOP_PX, LABEL_PX = 220, 18, 16
LEFT, RIGHT = 9.0, 93.0
"""Where the smallest and the largest memory are drawn, in per cent of the width."""
LABEL_DISTANCE = 25.0
"""Per cent of the width between two labels of one row, for a phone."""
GRID = (0.0, 0.25, 0.5, 0.75, 1.0)
LINE_SHARE, TEXT_SHARE = 180, 26
"""Width of a frame over the width of a box line, and over the height of letters."""
MAX_LETTERS = 24


@dataclass(frozen=True)
class Series:
    """One line of the curve: `points` are (memory in bytes, score, lowest and highest seed), `kind` its CSS class."""

    name: str
    kind: str
    points: Sequence[Point]


def picture(height: int, shapes: Iterable[Markup], kind: str = "", label: str = "") -> Markup:
    """A drawing of this height over the full width; without a label it is hidden from screen readers."""
    role = Markup('role="img" aria-label="{}"').format(label) if label else Markup('aria-hidden="true"')
    head = Markup('<svg class="{}" width="100%" height="{}" {}>').format(kind, height, role)
    return head + Markup("").join(shapes) + Markup("</svg>")


def track(*shapes: Markup, label: str = "") -> Markup:
    """A thin line from end to end, with shapes on it."""
    return picture(TRACK_PX, [rect(0, 100, "rail", y="8", height="6"), *shapes], "track", label)


def bar(parts: Iterable[tuple[str, float, str]], height: int = BAR_PX, label: str = "") -> Markup:
    """Parts side by side: (class, per cent of the width, label) each."""
    shapes, at = list[Markup](), 0.0
    for kind, width, part in parts:
        shapes.append(rect(at, width, kind, part))
        at += width
    return picture(height, shapes, "bar", label)


def rect(x: float, width: float, kind: str, label: str = "", y: str = "0", height: str = "100%") -> Markup:
    """A rectangle from `x`; the style makes it at least a pixel wide."""
    shape = Markup('<rect class="{}" x="{}%" width="{}%" y="{}" height="{}"')
    return shape.format(kind, _decimals(x), _decimals(width), y, height) + _close("rect", label)


def interval(low: float, high: float, kind: str) -> Markup:
    """A band of a track between two places."""
    return rect(low, high - low, f"reach {kind}", y="8", height="6")


def dot(x: float, kind: str, label: str = "", y: float = TRACK_PX / 2) -> Markup:
    """A point."""
    shape = Markup('<circle class="{}" cx="{}%" cy="{}" r="6"')
    return shape.format(kind, _decimals(x), _decimals(y)) + _close("circle", label)


def tick(x: float, kind: str, label: str = "") -> Markup:
    """A mark across a track."""
    return line((x, 1), (x, TRACK_PX - 1), f"tick {kind}", label)


def line(start: tuple[float, float], end: tuple[float, float], kind: str, label: str = "") -> Markup:
    """A line between two places (per cent, pixels)."""
    shape = Markup('<line class="{}" x1="{}%" y1="{}" x2="{}%" y2="{}"')
    return shape.format(kind, *map(_decimals, (*start, *end))) + _close("line", label)


def text(x: float, y: float, content: str, kind: str = "", anchor: str = "middle") -> Markup:
    """A text that starts, is centred or ends at a place."""
    shape = Markup('<text class="{}" x="{}%" y="{}" text-anchor="{}">{}</text>')
    return shape.format(kind, _decimals(x), _decimals(y), anchor, content)


def label_rows(places: Sequence[float], distance: float) -> list[int]:
    """For each label (places rising) the first row in which it is this far from the one before."""
    last: list[float] = []
    rows = []
    for place in places:
        row = next((row for row, before in enumerate(last) if place - before >= distance), len(last))
        last[row:] = [place, *last[row + 1 :]]
        rows.append(row)
    return rows


def draw_curve(
    series: Sequence[Series],
    settings: Mapping[int, str],
    level: tuple[str, float] | None = None,
    style: Callable[[float], str] = lambda value: number(value, 2),
) -> Markup | None:
    """Scores over memory, a line for each series; None where there is nothing to draw.

    `settings` names the bytes of memory that were simulated; `level` (name, score) is drawn across; `style` formats a
    score.
    """
    if not settings or not any(one.points for one in series):
        return None
    low, high = min(settings), max(settings)

    def x(nbytes: int) -> float:
        return LEFT + (RIGHT - LEFT) * (nbytes - low) / (high - low) if high > low else (LEFT + RIGHT) / 2

    def y(score: float) -> float:
        return TOP_PX + (1 - min(1.0, max(0.0, score))) * (CURVE_PX - TOP_PX)

    shapes: list[Markup] = []
    for value in GRID:
        shapes.append(line((0, y(value)), (100, y(value)), "grid"))
        shapes.append(text(0, y(value) - 3, style(value), "soft", "start"))
    if level is not None:
        shapes.append(line((0, y(level[1])), (100, y(level[1])), "level", f"{level[0]}: {style(level[1])}"))
    for one in series:
        ends = [(x(nbytes), y(score)) for nbytes, score, _, _ in one.points]
        shapes += [line(start, end, f"path {one.kind}") for start, end in pairwise(ends)]
        for (nbytes, score, lowest, highest), (across, down) in zip(one.points, ends, strict=True):
            label = f"{one.name}, {size(nbytes)}: {style(score)} ({style(lowest)} to {style(highest)})"
            shapes.append(line((across, y(lowest)), (across, y(highest)), f"spread {one.kind}"))
            shapes.append(dot(across, one.kind, label, down))
            if len(series) == 2:  # the figures of more than two lines would overlap
                above = one is max(series, key=lambda each: _score_at(each, nbytes))
                shapes.append(text(across, down - 11 if above else down + 20, style(score), f"value {one.kind}"))
    return _with_memory_labels(shapes, [(x(nbytes), name, nbytes) for nbytes, name in sorted(settings.items())])


def draw_boxes(example: DetectionExample, model: str, several: bool) -> Markup:
    """The overlay of an example frame: found objects white, missed ones red, the model's boxes in its colour.

    False alarms are dashed. With `several` classes each box is named.
    """
    width, height, boxes = example.width, example.height, getattr(example, model)
    missed = [one for one in example.truth if model not in one.found]
    shapes = [_outline(one, "missed" if one in missed else "truth") for one in example.truth]
    shapes += [_outline(one, model if one.right else f"{model} alarm") for one in boxes]
    if several:
        shapes += [_class_name(one, "missed", width) for one in missed]
        shapes += [_class_name(one, model, width) for one in boxes]
    head = Markup('<svg viewBox="0 0 {} {}" preserveAspectRatio="none" style="--thick: {}px; --letters: {}px">')
    thick, letters = _decimals(width / LINE_SHARE, 1), _decimals(width / TEXT_SHARE, 1)
    return head.format(width, height, thick, letters) + Markup("").join(shapes) + Markup("</svg>")


def _score_at(series: Series, nbytes: int) -> float:
    return next((score for at, score, _, _ in series.points if at == nbytes), 0.0)


def _with_memory_labels(shapes: list[Markup], settings: Sequence[tuple[float, str, int]]) -> Markup:
    rows = label_rows([place for place, _, _ in settings], LABEL_DISTANCE)
    for (place, name, nbytes), row in zip(settings, rows, strict=True):
        shapes.append(line((place, CURVE_PX), (place, CURVE_PX + 4), "grid"))
        down = CURVE_PX + LABEL_PX * (2 * row + 1) + 2
        shapes.append(text(place, down, name))
        if name.replace(" ", "") != size(nbytes).replace(" ", ""):
            shapes.append(text(place, down + LABEL_PX - 2, size(nbytes), "soft"))
    height = CURVE_PX + 2 * LABEL_PX * (max(rows, default=0) + 1) + 6
    return picture(height, shapes, "curve", "accuracy on the stream over memory")


def _outline(found: TrueBox | PredictedBox, kind: str) -> Markup:
    """An object's polygons, else its box, drawn twice: dark and wide below, to be visible on any background."""
    if found.polygons:
        shape = Markup('<path class="{}" d="{}"/>')
        parts = (" ".join(f"{_decimals(x, 1)},{_decimals(y, 1)}" for x, y in polygon) for polygon in found.polygons)
        at = [" ".join(f"M{part}Z" for part in parts)]
    else:
        x0, y0, x1, y1 = found.box
        shape = Markup('<rect class="{}" x="{}" y="{}" width="{}" height="{}"/>')
        at = [_decimals(value, 1) for value in (x0, y0, max(0.0, x1 - x0), max(0.0, y1 - y0))]
    return shape.format("under", *at) + shape.format(kind, *at)


def _class_name(one: TrueBox | PredictedBox, kind: str, width: float) -> Markup:
    x0, y0, _, _ = one.box
    name = one.name if len(one.name) <= MAX_LETTERS else f"{one.name[: MAX_LETTERS - 1]}…"
    letters = width / TEXT_SHARE
    down = y0 - letters / 4 if y0 > 1.4 * letters else y0 + letters
    shape = Markup('<text class="{}" x="{}" y="{}">{}</text>')
    return shape.format(kind, _decimals(max(0.0, x0), 1), _decimals(down, 1), name)


def _close(name: str, label: str) -> Markup:
    return Markup("><title>{}</title></{}>").format(label, name) if label else Markup("/>")


def _decimals(value: float, digits: int = 2) -> str:
    return f"{value:.{digits}f}".rstrip("0").rstrip(".")
