"""The harness itself: what it is there to see, it sees; and every sample is sound."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hostile import harness
from tests.hostile.harness import refused, refused_apart, tried
from tests.hostile.samples import BUNDLE, HALF, OLD, RESUME, UPDATE

READERS = {
    "workload": ["inspect", "workload.yaml", "--weights"],
    "bundle": ["bundle", "verify", BUNDLE],
    "log": ["bundle", "show", BUNDLE],
    "profile": ["plan", BUNDLE],
    "trace": ["simulate", "--replay", "trace.jsonl"],
    "box config": ["run", "box.yaml", "--check"],
    "darknet": ["inspect", "yolo.yaml", "--weights"],
    "checkpoint": [*RESUME],
    "update": ["bundle", "apply", OLD, UPDATE, "-o", "new"],
    "key": ["bundle", "verify", OLD, "--public-key", "box-key.pub"],
}


@pytest.mark.parametrize("command", READERS.values(), ids=READERS)
def test_every_sample_is_sound(house: Path, command: list[object]) -> None:
    seen = tried(command, house).held()
    assert seen.code == 0, seen


def test_a_merge_is_half_done(whole_house: Path) -> None:
    assert (whole_house / f"{HALF}.work" / "state.pt").is_file() and not (whole_house / HALF).exists()


def test_what_is_refused_is_one_line_here_and_apart(house: Path) -> None:
    path = house / "workload.yaml"
    path.write_text("[")
    assert refused(["inspect", path], house, path) == refused_apart(["inspect", path], house, path)


def _tells(*more: object) -> None:
    os.write(2, b"a line\n")


def _compute() -> None:
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass


HARMS: dict[str, Callable[[Path], object]] = {
    "says nothing": lambda _: None,
    "says it twice": lambda _: (_tells(), _tells()),
    "writes to stdout": lambda _: (_tells(), print("out")),
    "writes a text that is none": lambda _: os.write(2, b"\x1b[2J\n"),
    "removes a file": lambda house: (_tells(), (house / BUNDLE).unlink()),
    "changes a file": lambda house: (_tells(), (house / "workload.yaml").write_bytes(b"")),
    "makes a folder": lambda house: (_tells(), (house / "new").mkdir()),
    "leaves a temporary file": lambda _: (_tells(), tempfile.mkstemp()),
    "warns": lambda _: (_tells(), warnings.warn("x", stacklevel=1)),
    "takes memory": lambda _: (_tells(), len(b"x" * (600 * 2**20))),
    "takes time": lambda _: (_tells(), _compute()),
}


@pytest.mark.parametrize("harm", [None, *HARMS])
def test_the_harness_sees_what_it_is_there_for(house: Path, monkeypatch: pytest.MonkeyPatch, harm: str | None) -> None:
    def main(_: object) -> int:
        (HARMS[harm] if harm else _tells)(house)
        return 2

    monkeypatch.setattr(harness, "main", main)
    monkeypatch.setattr(harness, "MAX_SECONDS", 0.2 if harm == "takes time" else 5.0)
    with pytest.raises(AssertionError) if harm else contextlib.nullcontext():
        refused(["x"], house)
