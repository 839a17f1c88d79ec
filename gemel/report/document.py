"""report.json read again, as something that anybody may have written: within bounds, of known keys, whole."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from models.errors import InputError
from models.io import MAX_QUERIES, Exact, read_json, validate

REPORT_JSON = "report.json"
REPORT_FORMAT = 2
"""Of report.json: no other is read."""
ARMS = ("originals", "merged")
REMEDY = "evaluate again: gemel eval BUNDLE WORKLOAD -o DIR"
MAX_TEXT, MAX_SETTINGS = 4096, 100
Share = Annotated[float, Field(ge=0, le=1)]
Ratio = Annotated[float, Field(ge=0, le=1e6)]
Count = Annotated[int, Field(ge=0, le=2**60)]
Text = Annotated[str, Field(max_length=MAX_TEXT)]


class _Keys(Exact, extra="allow"):
    """What is read of a mapping; what else it holds is left."""


class _Offline(_Keys):
    query: Text
    task: Literal["classification", "detection"]
    metric: Text
    samples: Count
    original: Share
    merged: Share
    ratio: Ratio
    ci95: Annotated[list[Ratio], Field(min_length=2, max_length=2)] | None
    target: Ratio
    met: bool
    certain: bool
    worth: bool


class _Streamed(_Keys):
    arm: Literal["originals", "merged"]
    memory: Text
    memory_bytes: Count
    query: Text
    accuracy: Share
    by_seed: Annotated[list[Share], Field(min_length=1, max_length=1000)]


class _Bytes(_Keys):
    before: Annotated[int, Field(ge=1, le=2**60)]
    after: Count
    ceiling: Count
    saved_fraction: Annotated[float, Field(ge=-1e6, le=1)]
    ceiling_fraction: Share


class _Bundle(_Keys):
    file: Text
    digest: Text


class _Device(_Keys):
    title: Text
    clock: Text
    modelled: bool


class _Asked(_Keys):
    memory: Text
    memory_bytes: Count


class _Report(_Keys):
    workload: Text
    method: Text
    bundle: _Bundle
    created_at: Text
    device: _Device
    seeds: Annotated[list[Count], Field(max_length=1000)]
    bytes: _Bytes
    shared: list[Any]
    offline: Annotated[list[_Offline], Field(min_length=1, max_length=MAX_QUERIES)]
    streaming: list[_Streamed]
    asked: _Asked
    commands: Annotated[list[Text], Field(max_length=100)]


def report_path(given: str | Path) -> Path:
    """The report.json that is meant: the file itself, or that in a folder of `gemel eval`."""
    path = Path(given)
    return path / REPORT_JSON if path.is_dir() else path


def read_report(path: Path) -> dict[str, Any]:
    """The document that `gemel eval` wrote; InputError for anything else, or for one that contradicts itself."""
    document = read_json(path, REMEDY)
    if document.get("format") != REPORT_FORMAT:
        raise InputError(path, "is no report of this version's gemel eval", REMEDY, "format")
    validate(path, document, _Report, hint=REMEDY)
    queries = [row["query"] for row in document["offline"]]
    if len(set(queries)) < len(queries):
        raise InputError(path, "a query stands twice", REMEDY, "offline")
    _check_streams(path, document["streaming"], queries)
    return document


def _check_streams(path: Path, streaming: list[dict[str, Any]], queries: list[str]) -> None:
    """Both arms of every query under every memory setting, each once, for the same bytes and seeds."""
    wanted = sorted((arm, query) for arm in ARMS for query in queries)
    settings: dict[str, list[dict[str, Any]]] = {}
    for row in streaming:
        settings.setdefault(row["memory"], []).append(row)
    if len(settings) > MAX_SETTINGS:
        raise InputError(path, f"more than {MAX_SETTINGS} memory settings", REMEDY, "streaming")
    seeds = {len(row["by_seed"]) for row in streaming}
    for memory, rows in settings.items():
        if sorted((row["arm"], row["query"]) for row in rows) != wanted or len(seeds) > 1:
            fault = f"the rows of memory {memory} are not of both arms and all queries, once each"
            raise InputError(path, fault, REMEDY, "streaming")
        if len({row["memory_bytes"] for row in rows}) > 1:
            raise InputError(path, f"memory {memory} is not the same bytes in all rows", REMEDY, "streaming")
