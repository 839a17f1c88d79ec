"""Jinja templates of the pages: autoescaped, one style sheet inlined, nothing loaded from outside."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from markupsafe import Markup, escape

from gemel.report import drawing
from gemel.text import key_text, number, percent, size


def render_template(page: str, **values: Any) -> str:
    """A page of `pages/` with these values; equal values give equal text."""
    return _environment().get_template(page).render(css=Markup(_page_file("style.css")), draw=drawing, **values)


def whole_percent(value: float | None) -> str:
    """A fraction as 52 %."""
    return percent(value, 0)


def two_decimals(value: float | None) -> str:
    """A number to two decimals."""
    return number(value, 2)


def milliseconds(value: float | None) -> str:
    """A time as 8.3 ms, 120 ms or 2.4 s; a dash for None."""
    if value is None:
        return "-"
    if value >= 1000:
        return f"{value / 1000:.3g} s"
    return f"{value:.0f} ms" if value >= 10 else f"{value:.2g} ms"


def joined_times(values: Sequence[float]) -> str:
    """Times in one unit, as 80 / 120 / 400 ms."""
    in_seconds = max(values) >= 10_000
    parts = [f"{value / 1000:.1f}" if in_seconds else f"{value:.0f}" for value in values]
    return f"{' / '.join(parts)} {'s' if in_seconds else 'ms'}"


def breakable(name: str) -> Markup:
    """A name that may be broken after each hyphen, underscore or dot."""
    return Markup(re.sub(r"([-_.])", r"\1<wbr>", str(escape(name))))


@cache
def _environment() -> Any:
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    made = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=FunctionLoader(_page_file),
    )
    made.filters.update(
        size=size, percent=percent, percent0=whole_percent, number=two_decimals, words=key_text, breakable=breakable
    )
    made.globals.update(
        percent0=whole_percent, two_decimals=two_decimals, milliseconds=milliseconds, joined_times=joined_times
    )
    return made


def _page_file(name: str) -> str:
    return files("gemel.report").joinpath("pages").joinpath(name).read_text(encoding="utf-8")
