"""What engines keep on disk: found by its key, made anew where it is damaged, nothing left of what failed."""

from __future__ import annotations

import json
import multiprocessing
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from edge_runtime.engines.package_cache import EngineCache
from models.errors import InputError

KEY = {"model": "resnet18", "classes": 3}


def writer(path: Path) -> dict[str, int]:
    path.write_bytes(b"package")
    return {"workspace": 7}


def refuse(path: Path) -> dict[str, int]:
    raise AssertionError("made a second time")


def test_cache_finds_a_file_by_its_key_alone(tmp_path):
    cache = EngineCache(tmp_path / "engines")
    assert cache.find(KEY, ".pt2") is None
    made = cache.fetch(KEY, ".pt2", writer)
    assert made.path.read_bytes() == b"package" and made.notes == {"workspace": 7}
    again = EngineCache(tmp_path / "engines").fetch(dict(reversed(KEY.items())), ".pt2", refuse)
    assert (again.path, again.notes) == (made.path, made.notes)
    assert cache.find({**KEY, "classes": 4}, ".pt2") is None and cache.find(KEY, ".onnx") is None


def record(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def rewrite(**keys: object) -> Callable[[Path], object]:
    """The record with other values."""
    return lambda path: record(path).write_text(json.dumps({**json.loads(record(path).read_text()), **keys}))


def link_elsewhere(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a flipped bit": lambda path: path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]),
    "a link": link_elsewhere,
    "writable by others": lambda path: path.chmod(0o666),
    "record garbage": lambda path: record(path).write_bytes(b"\x80\x04"),
    "record gone": lambda path: record(path).unlink(),
    "no digest": rewrite(sha256=None),
    "another key": rewrite(key={"model": "other"}),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_cache_damaged_file_is_made_again(tmp_path, damage):
    cache = EngineCache(tmp_path / "engines")
    damage(cache.fetch(KEY, ".pt2", writer).path)
    assert cache.find(KEY, ".pt2") is None
    assert cache.fetch(KEY, ".pt2", writer).path.read_bytes() == b"package"
    assert cache.find(KEY, ".pt2") is not None


def test_cache_file_or_folder_of_another_user_is_not_used(tmp_path, monkeypatch):
    cache, me = EngineCache(tmp_path / "engines"), os.getuid()
    assert stat.S_IMODE(cache.folder.stat().st_mode) == 0o700
    cache.fetch(KEY, ".pt2", writer)
    monkeypatch.setattr(os, "getuid", lambda: me + 1)
    assert cache.find(KEY, ".pt2") is None
    with pytest.raises(InputError, match="belongs to another user"):
        EngineCache(tmp_path / "engines")


def test_cache_failed_make_leaves_nothing(tmp_path):
    cache = EngineCache(tmp_path / "engines")

    def fail(path: Path) -> dict[str, int]:
        path.write_bytes(b"half")
        raise RuntimeError("no compiler")

    with pytest.raises(RuntimeError, match="no compiler"):
        cache.fetch(KEY, ".pt2", fail)
    assert [path.suffix for path in cache.folder.iterdir()] == [".lock"]


def test_cache_removes_leftovers_of_a_killed_process(tmp_path):
    cache = EngineCache(tmp_path / "engines")

    def end(path: Path) -> dict[str, int]:
        path.write_bytes(b"half")
        os._exit(9)

    ended = multiprocessing.get_context("fork").Process(target=lambda: cache.fetch(KEY, ".pt2", end))
    ended.start()
    ended.join()
    assert ended.exitcode == 9 and [path for path in cache.folder.iterdir() if path.is_dir()]
    assert cache.fetch(KEY, ".pt2", writer).notes == {"workspace": 7}
    assert not [path for path in cache.folder.iterdir() if path.is_dir()]


def _race(folder: Path, barrier, made) -> None:
    def slowly(path: Path) -> dict[str, int]:
        with made.get_lock():
            made.value += 1
        path.write_bytes(b"x" * 10_000_000)
        return {}

    barrier.wait()
    assert EngineCache(folder).fetch(KEY, ".pt2", slowly).path.stat().st_size == 10_000_000


def test_cache_concurrent_processes_make_a_file_once(tmp_path):
    context = multiprocessing.get_context("fork")
    barrier, made = context.Barrier(3), context.Value("i", 0)
    racers = [context.Process(target=_race, args=(tmp_path / "engines", barrier, made)) for _ in range(3)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    assert [racer.exitcode for racer in racers] == [0, 0, 0] and made.value == 1
