"""The rooms of the merger point one way: what is imported lies in a room that comes before."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.source_rules import imports, sources

ROOMS = (
    "events",
    "distributed",
    "checkpoint",
    "outcomes",
    "training",
    "jobs",
    "workers",
    "ctx",
    "start",
    "mending",
    "widths",
    "methods",
    "merging",
)
"""From the ground up; the door of the whole, `merger`, comes last."""


@pytest.fixture(scope="module")
def merger(repository: Path):
    return sources(repository, ["merger"])


def _room(name: str) -> str:
    return name.split(".")[1] if "." in name else ""


def test_every_room_imports_only_from_those_before_it(merger) -> None:
    place = {room: at for at, room in enumerate(("report", *ROOMS, ""))}
    upwards = [
        f"{name} imports {other}"
        for name, source in merger.items()
        for other in imports(source, merger)
        if place[_room(other)] > place[_room(name)]
    ]
    assert upwards == []


def test_the_journal_knows_nothing_of_queries_or_the_workbench(merger) -> None:
    for name, source in merger.items():
        if _room(name) == "journal":
            text = source.path.read_text()
            assert "models.workload" not in text and "merger.core" not in text, name
