"""Numbers and tables as people read them on a terminal, and values as JSON can hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gemel.models.errors import duration_text, join_names, money_text, one_line, size_text

MAX_NAMES = 4
size = size_text
"""Bytes as budgets are given: 412.3 MiB."""
duration = duration_text
"""Seconds as 12 s, 3 min 05 s or 1 h 02 min."""


KEY_TEXTS = {
    "f1": "F1",
    "miou": "mIoU",
    "macro_f1": "macro F1",
    "oks_f1": "OKS F1",
    "recall_at_1": "recall@1",
    "shared_part": "shared",
    "private": "its own",
}


def key_text(name: str) -> str:
    """A JSON key, as of a metric, as text."""
    return KEY_TEXTS.get(name, name.replace("_", " "))


def percent(fraction: float | None, digits: int = 1) -> str:
    """A fraction as per cent; a dash for None."""
    return "-" if fraction is None else f"{100 * fraction:.{digits}f} %"


def number(value: float | None, digits: int = 3) -> str:
    """A number with this many decimals; a dash for None."""
    return "-" if value is None else f"{value:.{digits}f}"


def flops_text(flops: float) -> str:
    """FLOPs a second."""
    return f"{flops / 1e9:.3g} GFLOP/s"


def flops_change_text(before: float, after: float, with_prefix: float) -> str:
    """FLOPs a second before and after a merge, and with common prefixes where there are any."""
    prefix = f" ({flops_text(with_prefix)} with common prefixes)" if with_prefix < after else ""
    return f"{flops_text(before)} became {flops_text(after)}{prefix}"


def saved_text(saved: float, bound: float) -> str:
    """The part of all bytes saved, beside the layer-sharing bound where that is no less."""
    if saved <= bound:
        return f"{percent(saved)} saved (layer-sharing bound {percent(bound)})"
    causes = "also norms, heads or networks of others, or fewer bits"
    return f"{percent(saved)} saved (layers alone {percent(bound)} at most: {causes})"


def cost_text(cost: Mapping[str, Any]) -> str:
    """What a merge took, what a GiB saved costs, and what it said before."""
    money = f", {money_text(cost['money'], cost['currency'])}" if cost["money"] is not None else ""
    if cost["money_per_gib"] is not None:
        money += f" ({money_text(cost['money_per_gib'], cost['currency'])} for each GiB saved)"
    told = ""
    if cost["told_seconds"] is not None:
        before = f"{money_text(cost['told_money'], cost['currency'])}, " if cost["told_money"] is not None else ""
        told = f"; told before: {before}{duration(cost['told_seconds'])}"
    return f"the merge took {duration(cost['seconds'])}, {cost['flops']:.3g} FLOPs{money}{told}"


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


def networks_text(networks: Mapping[str, str | None]) -> str:
    """Which query's model answers for others, from query -> the query whose network answers it; empty where none."""
    served: dict[str, list[str]] = {}
    for query, donor in networks.items():
        if donor is not None:
            served.setdefault(donor, []).append(query)
    if len(served) == 1 and all(donor or query in served for query, donor in networks.items()):
        return f"one model answers for all {len(networks)} queries: that of {next(iter(served))}"
    return "; ".join(f"the model of {donor} answers for {join_names(own, MAX_NAMES)}" for donor, own in served.items())


def flips_text(right: int, wrong: int, upper_end: float, frames: Sequence[str]) -> str:
    """How many right answers are wrong now, at most how many could be, and which."""
    text = f"of {right:,} right answers {wrong:,} are wrong now (at most {percent(upper_end)})"
    return f"{text}: {join_names(frames, MAX_NAMES)}" if frames else text


def bits_text(bits: str, in_integers: bool) -> str:
    """The bits of most of a query's weights, and whether it is computed in integers."""
    return f"{bits}, in integers" if in_integers else bits


def state_text(state: str, lower_end: float | None, source: str | None, needs: str) -> str:
    """What is proven of a query, by what, or what is lacking."""
    if state == "proven" and lower_end is not None:
        return f"proven: at least {percent(lower_end)}, by {source}"
    return f"not proven: needs {needs}" if state != "unchanged" and needs else state
