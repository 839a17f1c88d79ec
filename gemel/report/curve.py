"""Accuracy on the stream over memory, a line for each arm: inline SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup

from gemel.report import drawing
from gemel.text import number, size

HEIGHT_PX, TOP_PX, LABEL_PX = 220, 18, 16
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


def curve(
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
        return TOP_PX + (1 - min(1.0, max(0.0, accuracy))) * (HEIGHT_PX - TOP_PX)

    shapes: list[Markup] = []
    for value in GRID:
        shapes.append(drawing.line((0, y(value)), (100, y(value)), "grid"))
        shapes.append(drawing.text(0, y(value) - 3, f"{value:g}", "soft", "start"))
    if level is not None:
        shapes.append(drawing.line((0, y(level[1])), (100, y(level[1])), "level", f"{level[0]}: {number(level[1], 2)}"))
    for one in series:
        ends = [(x(nbytes), y(accuracy)) for nbytes, accuracy, _, _ in one.points]
        shapes += [drawing.line(start, end, f"path {one.kind}") for start, end in pairwise(ends)]
        for (nbytes, accuracy, least, most), (across, down) in zip(one.points, ends, strict=True):
            told = f"{one.name}, {size(nbytes)}: {number(accuracy, 2)} ({number(least, 2)} to {number(most, 2)})"
            shapes.append(drawing.line((across, y(least)), (across, y(most)), f"spread {one.kind}"))
            shapes.append(drawing.dot(across, one.kind, told, down))
            if len(series) == 2:  # of more, the figures would stand in each other's way
                above = one is max(series, key=lambda line: _at(line, nbytes))
                place = down - 11 if above else down + 20
                shapes.append(drawing.text(across, place, number(accuracy, 2), f"value {one.kind}"))
    return _labelled(shapes, [(x(nbytes), name, nbytes) for nbytes, name in sorted(settings.items())])


def _at(series: Series, nbytes: int) -> float:
    """The accuracy of a line at one memory setting."""
    return next((accuracy for at, accuracy, _, _ in series.points if at == nbytes), 0.0)


def _labelled(shapes: list[Markup], settings: Sequence[tuple[float, str, int]]) -> Markup:
    """The picture with the memory settings named below, in as many rows as they need."""
    rows = drawing.rows_of([place for place, _, _ in settings], LABELS_APART)
    for (place, name, nbytes), row in zip(settings, rows, strict=True):
        shapes.append(drawing.line((place, HEIGHT_PX), (place, HEIGHT_PX + 4), "grid"))
        down = HEIGHT_PX + LABEL_PX * (2 * row + 1) + 2
        shapes.append(drawing.text(place, down, name))
        if name.replace(" ", "") != size(nbytes).replace(" ", ""):
            shapes.append(drawing.text(place, down + LABEL_PX - 2, size(nbytes), "soft"))
    height = HEIGHT_PX + 2 * LABEL_PX * (max(rows, default=0) + 1) + 6
    return drawing.picture(height, shapes, "curve", "accuracy on the stream over memory")
