"""A merge's log that means harm: the bundle is shown all the same, and one line says what is wrong with the log."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from gemel.merge_outcomes import UNREADABLE, MergeOutcomes
from models.bundle import open_bundle
from tests.edge_runtime.tiny import FACTORY, tiny_bundle
from tests.hostile.damages import damages
from tests.hostile.harness import tried
from tests.hostile.reading.test_json import FILES, make_special

NAME = "tiny.safetensors.log.jsonl"
SHARED = [["gate", "3"], ["yard", "3"]]
WHY = {"road": {"after": "attempt 1 of 1", "ratio": 0.9, "required": 0.95}}
SET = {"set": [*SHARED, ["road", "3"]], "bytes": 100, "outcome": "partly", "kept": SHARED, "in_the_way": WHY,
       "residual_bytes": 0, "saved_bytes": 100, "flops": 1e9, "together": 1}  # fmt: skip
REPAIR = {"query": "yard", "repair": "head", "cost_bytes": 3, "ratio": 0.96, "required": 0.95, "flops": 1e9}
ALONE = {"alone": "gate", "ratio": 0.97, "required": 0.95, "epochs": 1, "flops": 1e9}
WAITS = {"waits": "road", "after": "the start", "lost": 0.5, "required": 0.95, "flops": 1e9}
WIDTHS = {"width": "int8", "stored_bytes": {"int8": 3}, "widened": ["gate: 3"], "in_the_way": ["gate"], "flops": 1e9}
EPOCH = {"epoch": 1, "ratios": {"gate": 0.9}}
ROWS: list[dict[str, Any]] = [EPOCH, REPAIR, ALONE, WAITS, WIDTHS, SET]


def _text(rows: list[Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _with(row: dict[str, Any], **keys: Any) -> str:
    return _text([EPOCH, {**row, **keys}])


BAD = {
    "empty lines": "\n\n",
    "garbage": b"\x80\x04\x95",
    "no UTF-8": b'{"a": "\xff"}\n',
    "lists": "[1]\n",
    "torn": _text(ROWS)[:-20],
    "deep": '{"set": ' + "[" * 100_000 + "\n",
    "deep within bounds": _with(SET, set=json.loads("[" * 45 + "]" * 45)),
    "many lines": '{"a": 1}\n' * 1_000_000,
    "a long line": '{"a": "' + "x" * 10_000_000 + '"}\n',
    "a key twice": '{"set": [], "set": []}\n',
    "not a number": _with(SET).replace("1000000000.0", "NaN"),
    "work without end": _with(SET).replace("1000000000.0", "1e999"),
    "a set of nothing": _with(SET, set=[]),
    "a set of numbers": _with(SET, set=[1, 2]),
    "members of three": _with(SET, set=[["a", "b", "c"]]),
    "kept in words": _with(SET, kept="all"),
    "an outcome of nobody": _with(SET, outcome="lost"),
    "bytes in words": _with(SET, bytes="100"),
    "negative bytes": _with(SET, bytes=-1),
    "bytes without end": _with(SET, bytes=10**18),
    "no work": _with(SET, flops=None),
    "together with nobody": _with(SET, together=0),
    "why in a list": _with(SET, in_the_way=["road"]),
    "why in words": _with(SET, in_the_way={"road": "slow"}),
    "a ratio in words": _with(SET, in_the_way={"road": {**WHY["road"], "ratio": "low"}}),
    "a repair of nothing": _text([{"repair": "head"}]),
    "a repair of a list": _with(REPAIR, query=["yard"]),
    "a repair in words": _with(REPAIR, ratio="high"),
    "alone in a list": _with(ALONE, alone=["gate"]),
    "waiting for nobody": _with(WAITS, waits=None),
    "waiting after a list": _with(WAITS, after=[[["x"]]]),
    "a way of numbers": _with(WIDTHS, in_the_way=[1, 2]),
    "a width of a list": _with(WIDTHS, width=["int8"]),
    "widened by a number": _with(WIDTHS, widened=3),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bundle(tmp_path_factory.mktemp("logged") / "tiny.safetensors").path


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    shutil.copy(made, tmp_path)
    return tmp_path


def _note(folder: Path) -> str:
    """What is said of the log, where the bundle is shown in words and as JSON."""
    found = MergeOutcomes.of(open_bundle(folder / "tiny.safetensors", [FACTORY]))
    assert found.to_text() and found.to_text(every_set=True) and json.dumps(found.to_json(), allow_nan=False)
    return found.note


def test_the_log_that_is_damaged_here_is_sound(folder: Path) -> None:
    (folder / NAME).write_text(_text(ROWS))
    assert _note(folder) == ""


@pytest.mark.parametrize("text", BAD.values(), ids=BAD)
def test_a_damaged_log_is_told_and_the_bundle_is_shown(folder: Path, text: str | bytes) -> None:
    (folder / NAME).write_bytes(text if isinstance(text, bytes) else text.encode())
    note = _note(folder)
    assert note.startswith(f"{UNREADABLE}: {folder / NAME}: ") and len(note) < 600 and note.isprintable()


@pytest.mark.parametrize("what", ["deep", "many lines", "a long line", *(kind for kind in FILES if kind != "missing")])
def test_the_command_shows_the_bundle_at_once(folder: Path, what: str) -> None:
    if what in FILES:
        make_special(folder / NAME, what)
    else:
        text = BAD[what]
        assert isinstance(text, str)
        (folder / NAME).write_text(text)
    seen = tried(["bundle", "show", "tiny.safetensors"], folder).held()
    assert seen.code == 0 and seen.err == "" and seen.out.count("log beside the bundle") == 1


def test_many_rows_are_shown_at_once(folder: Path) -> None:
    (folder / NAME).write_text(_text(ROWS) + 45_000 * (json.dumps(WIDTHS) + "\n"))
    seen = tried(["bundle", "show", "tiny.safetensors"], folder).held()
    assert seen.code == 0 and seen.out.count("stored int8") == 1


def test_whatever_place_of_a_log_is_damaged_the_bundle_is_shown(folder: Path) -> None:
    outcomes = {"told": 0, "shown": 0}
    for row in ROWS[1:]:
        for what, damaged in damages(row):
            (folder / NAME).write_text(_text([damaged]))
            note = _note(folder)
            assert len(note) < 1000, what
            outcomes["told" if note else "shown"] += 1
    assert outcomes["told"] > 400 and outcomes["shown"] > 20
