"""What was worked out once is not worked out again, and nothing but what was written is believed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from models.files import cached_on_disk as module
from models.io import cached_on_disk

ASKED = {"model": "resnet18", "classes": 2}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of what is remembered, empty, as a process meets it that has just started."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return _started_anew(monkeypatch, tmp_path)


def _started_anew(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Path:
    monkeypatch.setattr(module, "_HELD", {})
    return cache / "gemel" / "remembered"


def _finding(value: object) -> tuple[Callable[[], object], list[object]]:
    calls: list[object] = []

    def find() -> object:
        calls.append(value)
        return value

    return find, calls


def test_the_same_is_found_once_by_any_number_of_processes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find, calls = _finding({"flops": 3, "shape": [1, 2]})
    for _ in range(3):
        assert cached_on_disk(ASKED, find) == {"flops": 3, "shape": [1, 2]}
        _started_anew(monkeypatch, folder)
    assert len(calls) == 1 and len(list(folder.iterdir())) == 1
    assert folder.stat().st_mode & 0o777 == 0o700


def test_another_question_or_other_code_has_another_answer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cached_on_disk(ASKED, lambda: 1) == 1
    assert cached_on_disk({**ASKED, "classes": 3}, lambda: 2) == 2
    monkeypatch.setattr(module, "_code", lambda: "changed")
    assert cached_on_disk(ASKED, lambda: 3) == 3


def test_the_code_is_every_source_and_the_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {path.parent.name for path in module._sources()} >= {"zoo", "detectors", "parts", "torch", "torchvision"}
    for package in module.PACKAGES:
        (tmp_path / package).mkdir()
    (tmp_path / "models" / "net.py").write_text("depth = 18")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    before = module._code.__wrapped__()
    (tmp_path / "models" / "net.py").write_text("depth = 34")
    assert module._code.__wrapped__() != before


@pytest.mark.parametrize("damage", ["bytes", "half", "empty", "link", "writable", "deep"])
def test_what_is_not_as_it_was_written_is_found_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    cached_on_disk(ASKED, lambda: {"flops": 3})
    (path,) = folder.iterdir()
    good = path.read_bytes()
    if damage == "link":
        path.rename(folder / "elsewhere")
        path.symlink_to(folder / "elsewhere")
    elif damage == "writable":
        path.chmod(0o666)
    else:
        path.write_bytes(
            {"bytes": good.replace(b"3}", b"4}"), "half": good[:-3], "empty": b"", "deep": b"[" * 9999}[damage]
        )
    _started_anew(monkeypatch, folder)
    find, calls = _finding({"flops": 3})
    assert cached_on_disk(ASKED, find) == {"flops": 3} and len(calls) == 1


def test_without_a_folder_of_ones_own_it_is_found_each_time(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find, calls = _finding(1)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for _ in range(2):
        assert cached_on_disk(ASKED, find) == 1
        _started_anew(monkeypatch, folder)
    assert len(calls) == 2


def test_what_fails_is_not_remembered(folder: Path) -> None:
    def fail() -> object:
        raise ValueError("cannot be built")

    for _ in range(2):
        with pytest.raises(ValueError, match="cannot be built"):
            cached_on_disk(ASKED, fail)
    assert not list(folder.iterdir())


def test_no_more_is_kept_than_a_bound(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_KEPT", 6)
    for index in range(20):
        cached_on_disk({"index": index}, lambda: 0)
        newest = max(folder.iterdir(), key=lambda path: path.stat().st_ctime_ns)
        os.utime(newest, (index, index))
        assert len(list(folder.iterdir())) <= 6
    assert newest.exists()
