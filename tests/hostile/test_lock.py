"""Two processes that would write one output: the second is told so in one line, and touches nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from models.errors import InputError
from models.io import locked
from tests.hostile.harness import Seen, refused, tried, tried_apart
from tests.hostile.samples import BUNDLE, HALF, RESUME

HOLDER = "import sys; from models.io import locked\nwith locked(sys.argv[1]): print('held', flush=True); input()"
SECONDS = 30.0

WRITERS = {
    "merge": (["merge", "merge.yaml", "-o", "new.safetensors"], "new.safetensors"),
    "resumed": ([*RESUME], HALF),
    "train": (["train", "merge.yaml", "--query", "a"], "weights/a.safetensors"),
    "profile": (["profile", BUNDLE], f"{BUNDLE}.profile.json"),
    "eval": (["eval", BUNDLE, "workload.yaml", "-o", "report"], "report/report.json"),
    "demo": (["demo", "--out", "shown"], "shown/demo.json"),
}


@contextmanager
def held(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process holds the lock of a file."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(("command", "output"), WRITERS.values(), ids=WRITERS)
def test_the_second_of_two_is_refused_and_changes_nothing(house: Path, command: list[object], output: str) -> None:
    if command[0] == "demo":
        (house / "shown").mkdir()
        (house / output).write_text('{"demo": "sample", "seed": 0}')
    with held(house / output):
        refused(command, house, output, "is being written by another process")


def test_what_a_killed_process_held_is_free_and_its_lock_goes_with_the_next(tmp_path: Path) -> None:
    with held(tmp_path / "out") as process:
        process.kill()
        process.wait()
        assert [path.name for path in tmp_path.iterdir()] == [".out.lock"]
        with locked(tmp_path / "out"):
            pass
    assert not list(tmp_path.iterdir())


def test_two_merges_at_once_end_with_the_firsts_bundle(house: Path) -> None:
    command = ["merge", "merge.yaml", "-o", "new.safetensors", "--method", "none"]
    second: list[Seen] = []

    def meanwhile(first: subprocess.Popen[bytes]) -> None:
        late = time.monotonic() + SECONDS
        while not (house / ".new.safetensors.lock").exists():
            assert time.monotonic() < late
            time.sleep(0.01)
        first.send_signal(signal.SIGSTOP)
        second.append(tried(command, house))
        first.send_signal(signal.SIGCONT)

    first = tried_apart(command, house, meanwhile=meanwhile)
    assert (first.code, second[0].code) == (0, 2), (first, second)
    assert second[0].err.count("\n") == 1 and "is being written by another process" in second[0].err
    assert tried(["bundle", "verify", "new.safetensors"], house).code == 0
    assert not list(house.glob(".*.lock")) and not (house / "new.safetensors.work").exists()


def test_several_locks_are_taken_together_and_folders_that_stay_empty_go_again(tmp_path: Path) -> None:
    with locked(tmp_path / "a" / "b" / "one", tmp_path / "a" / "c" / "two"):
        (tmp_path / "a" / "b" / "one").touch()
        with pytest.raises(InputError, match="two: is being written"), locked(tmp_path / "a" / "c" / "two"):
            pass
        with locked(tmp_path / "three"):
            pass
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")) == ["a", "a/b", "a/b/one"]


@pytest.mark.parametrize("name", ["n" * 250, "é" * 125], ids=["long", "long in bytes"])
def test_a_name_as_long_as_may_be_can_be_locked(tmp_path: Path, name: str) -> None:
    with locked(tmp_path / name), pytest.raises(InputError, match="is being written"), locked(tmp_path / name):
        pass


def test_a_link_in_the_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / ".out.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match=r"\.out\.lock: cannot be written"), locked(tmp_path / "out"):
        pass
    assert not (tmp_path / "elsewhere").exists()
