"""The boxes of one model on an example frame, and the objects that it should have found: inline SVG over the photo."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

LINE_SHARE, TEXT_SHARE = 180, 26
"""Width of the frame over that of a line, and over the height of letters."""
MAX_LETTERS = 24


def overlay(example: Mapping[str, Any], arm: str, several: bool) -> Markup:
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
        head.format(width, height, _short(width / LINE_SHARE), _short(width / TEXT_SHARE))
        + Markup("").join(shapes)
        + Markup("</svg>")
    )


def _outlined(box: list[float], kind: str) -> Markup:
    """A box twice: dark and wide below, so that it is seen on any ground."""
    x0, y0, x1, y1 = box
    shape = Markup('<rect class="{}" x="{}" y="{}" width="{}" height="{}"/>')
    at = [_short(value) for value in (x0, y0, max(0.0, x1 - x0), max(0.0, y1 - y0))]
    return shape.format("under", *at) + shape.format(kind, *at)


def _named(one: Mapping[str, Any], kind: str, width: float) -> Markup:
    x0, y0, _, _ = one["box"]
    name = one["class"] if len(one["class"]) <= MAX_LETTERS else f"{one['class'][: MAX_LETTERS - 1]}…"
    letters = width / TEXT_SHARE
    down = y0 - letters / 4 if y0 > 1.4 * letters else y0 + letters
    shape = Markup('<text class="{}" x="{}" y="{}">{}</text>')
    return shape.format(kind, _short(max(0.0, x0)), _short(down), name)


def _short(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
