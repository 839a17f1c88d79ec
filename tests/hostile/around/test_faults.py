"""Interrupts and a system that refuses, at each place where a command touches a file: nothing is half-written."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from gemel.cli import main
from models.errors import InputError
from models.io import open_atomic
from tests.hostile import harness
from tests.hostile.around.faults import At, Faults, faults
from tests.hostile.harness import TRACEBACK, Seen, snapshot, tried
from tests.hostile.samples import BUNDLE, HALF, RESUME, copy_house

COMMANDS = {
    "inspect": ("inspect", "workload.yaml", "--weights"),
    "show": ("bundle", "show", BUNDLE),
    "verify": ("bundle", "verify", BUNDLE),
    "plan": ("plan", BUNDLE),
    "simulate": ("simulate", BUNDLE, "--duration", 1),
    "replay": ("simulate", "--replay", "trace.jsonl"),
    "check": ("run", "box.yaml", "--check"),
    "run": ("run", "box.yaml"),
    "eval": ("eval", BUNDLE, "workload.yaml", "-o", "report", "--seeds", 1),
    "train": ("train", "merge.yaml", "--query", "a", "--passes", 8, "--cycles", 1),
    "merge": ("merge", "merge.yaml", "-o", "n.safetensors", "--method", "none"),
    "resume": RESUME,
}
QUICK = ("show", "replay", "train")
LONG = pytest.mark.exhaustive
OUTPUTS = ("report.json", "n.safetensors", "n.safetensors.log.jsonl", HALF, "a.safetensors",
           f"{HALF}.log.jsonl")  # fmt: skip


Attempt = Callable[[tuple, At, Callable[[str], BaseException]], tuple[Seen, Faults]]


@pytest.fixture
def attempt(whole_house: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Attempt:
    """A function that runs a command in a new copy of the house with faults (`faults.py`), and gives what it saw."""
    made: list[Path] = []

    def run(command: tuple, at: At, fault: Callable[[str], BaseException]) -> tuple[Seen, Faults]:
        folder = tmp_path / f"house{len(made)}"
        made.append(folder)
        copy_house(whole_house, folder)
        there: list[Faults] = []

        def struck(argv: tuple[str, ...]) -> int:
            with faults(folder, at, fault) as seen:
                there.append(seen)
                return main(argv)

        monkeypatch.setattr(harness, "main", struck)
        seen = tried(command, folder)
        assert not [path for path in snapshot(folder) if path.endswith(".tmp")], "something half-written is left"
        return seen, there[0]

    return run


def places(found: Faults) -> list[int]:
    """Where to strike: the first, the second and the last change of each file, the first reading of each kind."""
    kinds: dict[tuple[str, bool], list[int]] = {}
    for index, (path, changes) in enumerate(found.touched):
        name = Path(path).name
        kind = name.rpartition(".")[0].rpartition(".")[0] if name.endswith(".tmp") else name
        kinds.setdefault((kind if changes else Path(path).suffix, changes), []).append(index)
    chosen = (
        (each[0], each[min(1, len(each) - 1)], each[-1]) if changes else each[:1]
        for (_, changes), each in kinds.items()
    )
    return sorted({index for indices in chosen for index in indices})


def place_of(path: str) -> str:
    """Where a temporary file or folder is to lie; what lies in the folder of a merge is told of that."""
    parts = [part.strip(".") for part in Path(path).parts if ".work" in part] or [Path(path).name.strip(".")]
    return ".".join(parts[0].split(".")[:2]).removesuffix(".tmp")


def last_line(seen: Seen) -> str:
    """What a command came to; long ones tell how far they are before it."""
    assert TRACEBACK not in seen.err and seen.err.endswith("\n"), seen.err
    lines = seen.err.splitlines()
    assert [line for line in lines if line.startswith("gemel: ")] == [lines[-1]], seen.err
    return lines[-1]


@pytest.mark.parametrize("name", [one if one in QUICK else pytest.param(one, marks=LONG) for one in COMMANDS])
def test_an_interrupt_at_any_touch_of_a_file_is_told_as_one_and_leaves_nothing_half_written(
    attempt: Attempt, name: str
) -> None:
    seen, whole = attempt(COMMANDS[name], lambda *_: False, KeyboardInterrupt)
    assert seen.code in (0, 1) and whole.touched, seen
    for place in places(whole):
        seen, found = attempt(COMMANDS[name], only(place), KeyboardInterrupt)
        if found.struck:  # how often a box writes is a matter of time
            assert seen.code == 130 and last_line(seen) == "gemel: interrupted", (whole.touched[place], seen)


def only(place: int) -> At:
    return lambda index, _: index == place


def full_from(place: int) -> At:
    return lambda index, changes: changes and index >= place


def full(_: str) -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("name", ["train", *(pytest.param(one, marks=LONG) for one in ("eval", "merge", "resume"))])
def test_a_full_disk_is_told_of_the_file_that_has_no_room_and_leaves_all_as_it_was(attempt: Attempt, name: str) -> None:
    _, whole = attempt(COMMANDS[name], lambda *_: False, full)
    for place in places(whole):
        path, changes = whole.touched[place]
        if changes:
            seen, _ = attempt(COMMANDS[name], full_from(place), full)
            said = last_line(seen)
            assert seen.code == 2 and "No space left on device" in said and place_of(path) in said, said
            changed = {Path(path).name for path in seen.changed}
            assert not changed & {*OUTPUTS} or "state.pt" in changed, "or else to be gone on with"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ENOENT, errno.ESTALE])
def test_whatever_the_system_refuses_a_file_is_whole_or_as_it_was(tmp_path: Path, number: int) -> None:
    path = tmp_path / "kept.bin"

    def write() -> None:
        with open_atomic(path, overwrite=True) as file:
            for part in range(3):
                file.write(bytes([part]) * 20_000)

    with faults(tmp_path, lambda *_: False, KeyboardInterrupt) as whole:
        write()
    assert len(whole.touched) >= 5, "opened, written, renamed"
    for place in (index for index, (_, changes) in enumerate(whole.touched) if changes):
        path.write_bytes(b"older")
        with (
            faults(tmp_path, only(place), lambda _: OSError(number, os.strerror(number))),
            pytest.raises(InputError) as refused,
        ):
            write()
        assert str(refused.value).startswith(f"{path}: cannot be written: {os.strerror(number)}; ")
        assert path.read_bytes() == b"older" and [*tmp_path.iterdir()] == [path]
