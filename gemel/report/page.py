"""The report as one self-contained HTML page, readable on a phone and in the dark."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from importlib.resources import files
from typing import Any

from gemel.report import figures
from gemel.report.verdict import asked_of, verdict
from gemel.text import number, percent, size

SETS_SHOWN = 16
BYTE_KINDS = (
    ("shared_part", "shared with others (this query's part)"),
    ("private", "its own"),
    ("residual", "low-rank residual"),
)


def render(document: Mapping[str, Any], examples: Sequence[Mapping[str, Any]] = ()) -> str:
    """The page of a report document (`gemel.evaluation.evaluating`); `examples` = {query, caption, pictures} each."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(
        size=size, percent=percent, percent0=_percent0, number=_short, words=_words, breakable=_breakable
    )
    here = files("gemel.report")
    queries = [row["query"] for row in document["offline"]]
    sets = figures.top_sets(document["shared"], queries)
    streaming, asked = figures.streaming_panels(document["streaming"], document["offline"]), asked_of(document)
    total_parts = figures.total_parts(document["bytes"])
    return environment.from_string(here.joinpath("page.html").read_text(encoding="utf-8")).render(
        doc=document,
        css=Markup(here.joinpath("style.css").read_text(encoding="utf-8")),
        examples=examples,
        queries=queries,
        met=sum(row["met"] and row["worth"] for row in document["offline"]),
        certain=sum(row["certain"] and row["worth"] for row in document["offline"]),
        byte_rows=figures.byte_rows(document["bytes"]),
        total_parts=total_parts,
        byte_kinds=_byte_kinds({name for name, _, _ in total_parts}),
        verdict=verdict(document),
        asked=asked,
        headline=next((one for one in streaming["mean"]["settings"] if asked and one["memory"] == asked[0]), None),
        matrix=figures.sharing_matrix(document["shared"], queries),
        sets=sets,
        sets_shown=sets[:SETS_SHOWN],
        ratios=figures.accuracy_axis(document["offline"]),
        swapping=figures.swapping_rows(document["swapping"]),
        streaming=streaming,
        timelines=[{**one, "rows": figures.timeline_rows(one)} for one in document["timeline"]],
        percent0=_percent0,
    )


def _byte_kinds(present: Collection[str]) -> list[tuple[str, str, str]]:
    """The legend of the bytes: (class, name, shape) of what is drawn, and of nothing else."""
    return [("before", "original", ""), *((kind, name, "") for kind, name in BYTE_KINDS if kind in present)]


def _percent0(value: float) -> str:
    return percent(value, 0)


def _short(value: float | None) -> str:
    return number(value, 2)


def _words(name: str) -> str:
    return {"f1": "F1", "shared_part": "shared", "private": "its own"}.get(name, name.replace("_", " "))


def _breakable(name: str) -> Any:
    """A name that may be broken after each hyphen, underscore or dot."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"([-_.])", r"\1<wbr>", str(escape(name))))
