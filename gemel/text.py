"""Numbers and tables as people read them on a terminal, and values as JSON can hold them."""

from __future__ import annotations

from collections.abc import Sequence

from models.errors import one_line, size_text

size = size_text
"""Bytes as budgets are given: 412.3 MiB."""


def percent(fraction: float | None, digits: int = 1) -> str:
    """A fraction as per cent; a dash for None."""
    return "-" if fraction is None else f"{100 * fraction:.{digits}f} %"


def number(value: float | None, digits: int = 3) -> str:
    """A number with this many decimals; a dash for None."""
    return "-" if value is None else f"{value:.{digits}f}"


def duration(seconds: float) -> str:
    """Seconds as 12 s, 3 min 05 s or 1 h 02 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table in plain text; columns whose first cell is a number are aligned right."""
    cells = [[one_line(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in [list(headers), *cells]) for column in range(len(headers))]
    right = [bool(cells) and cells[0][column][:1] in "0123456789-+" for column in range(len(headers))]

    def line(row: Sequence[str]) -> str:
        parts = [
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ]
        return "  ".join(parts).rstrip()

    return "\n".join([line(headers), line(["-" * width for width in widths]), *(line(row) for row in cells)])
