"""report.json read back as untrusted input: known keys, bounded values, consistent rows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from gemel.report.conclusion import MERGED, ORIGINALS
from models.errors import InputError
from models.io import MAX_QUERIES, Exact, read_json, validate

REPORT_JSON = "report.json"
REPORT_FORMAT = 3
HINT = "evaluate again: gemel eval BUNDLE WORKLOAD -o DIR"
MAX_TEXT, MAX_SETTINGS = 4096, 100
Share = Annotated[float, Field(ge=0, le=1)]
Ratio = Annotated[float, Field(ge=0, le=1e6)]
Count = Annotated[int, Field(ge=0, le=2**60)]
Text = Annotated[str, Field(max_length=MAX_TEXT)]


class _Keys(Exact, extra="allow"):
    """A mapping of which some keys are read."""


class _Offline(_Keys):
    query: Text
    task: Literal["classification", "detection"]
    metric: Text
    samples: Count
    units: Count
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


class _BundleFile(_Keys):
    file: Text
    digest: Text


class _ReportDevice(_Keys):
    title: Text
    clock: Text
    modelled: bool


class _Headline(_Keys):
    memory: Text
    memory_bytes: Count


class _Report(_Keys):
    workload: Text
    method: Text
    bundle: _BundleFile
    created_at: Text
    device: _ReportDevice
    seeds: Annotated[list[Count], Field(max_length=1000)]
    bytes: _Bytes
    shared: list[Any]
    offline: Annotated[list[_Offline], Field(min_length=1, max_length=MAX_QUERIES)]
    streaming: list[_Streamed]
    headline: _Headline
    commands: Annotated[list[Text], Field(max_length=100)]


def report_path(given: str | Path) -> Path:
    """The report.json that is meant: the file itself, or that in a folder of `gemel eval`."""
    path = Path(given)
    return path / REPORT_JSON if path.is_dir() else path


def read_report(path: Path) -> dict[str, Any]:
    """The document that `gemel eval` wrote; InputError for anything else and for contradictory rows."""
    document = read_json(path, HINT)
    if document.get("format") != REPORT_FORMAT:
        raise InputError(path, "is no report of this version's gemel eval", HINT, "format")
    validate(path, document, _Report, hint=HINT)
    queries = [row["query"] for row in document["offline"]]
    if len(set(queries)) < len(queries):
        raise InputError(path, "a query occurs twice", HINT, "offline")
    _check_streams(path, document["streaming"], queries)
    return document


def _check_streams(path: Path, streaming: list[dict[str, Any]], queries: list[str]) -> None:
    """Both arms of every query at every memory setting, each once, for the same bytes and seeds."""
    wanted = sorted((arm, query) for arm in (MERGED, ORIGINALS) for query in queries)
    settings: dict[str, list[dict[str, Any]]] = {}
    for row in streaming:
        settings.setdefault(row["memory"], []).append(row)
    if len(settings) > MAX_SETTINGS:
        raise InputError(path, f"more than {MAX_SETTINGS} memory settings", HINT, "streaming")
    seeds = {len(row["by_seed"]) for row in streaming}
    for memory, rows in settings.items():
        if sorted((row["arm"], row["query"]) for row in rows) != wanted or len(seeds) > 1:
            problem = f"the rows of memory {memory} are not of both arms and all queries, once each"
            raise InputError(path, problem, HINT, "streaming")
        if len({row["memory_bytes"] for row in rows}) > 1:
            raise InputError(path, f"memory {memory} is not the same bytes in all rows", HINT, "streaming")
