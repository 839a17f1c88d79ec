"""The engines' cache, whose files are run as code: what was checked is what is used, and it is this user's own."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from edge_runtime.engines.compiled import inductor_cache
from edge_runtime.engines.package_cache import CachedFile, EngineCache
from models.errors import InputError

KEY = {"model": "resnet18"}


def _made(folder: Path, content: bytes, key: Mapping[str, Any] = KEY) -> CachedFile:
    def make(path: Path) -> dict[str, Any]:
        path.write_bytes(content)
        return {"ms": [1.5, float("inf")]}

    return EngineCache(folder).fetch(key, ".pt2", make)


def _record(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def _changed(**keys: Any) -> Callable[[Path], object]:
    """The record with other values."""
    return lambda path: _record(path).write_text(json.dumps({**json.loads(_record(path).read_text()), **keys}))


def _of_another(path: Path) -> None:
    """Package and record of another architecture under this one's name."""
    other = _made(path.parent, b"theirs", {"model": "other"}).path
    shutil.copy(other, path)
    shutil.copy(_record(other), _record(path))


def _large(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(2**40)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "a flipped bit": lambda path: path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]),
    "large": _large,
    "gone": lambda path: path.unlink(),
    "another's": _of_another,
    "record empty": lambda path: _record(path).write_bytes(b""),
    "record garbage": lambda path: _record(path).write_bytes(b"\x80\x04"),
    "record deep": lambda path: _record(path).write_text("[" * 100_000),
    "record a list": lambda path: _record(path).write_text("[]"),
    "record null": lambda path: _record(path).write_text("null"),
    "record of nothing": lambda path: _record(path).write_text("{}"),
    "record large": lambda path: _large(_record(path)),
    "record gone": lambda path: _record(path).unlink(),
    "record twice": lambda path: _record(path).write_text('{"key": 1, ' + _record(path).read_text()[1:]),
    "other notes": _changed(notes='{"ms": 1}'),
    "notes of another kind": _changed(notes={"ms": 1}),
    "no notes": _changed(notes=None),
    "no bytes": _changed(bytes=None),
    "bytes below": _changed(bytes=-1),
    "no digest": _changed(sha256=None),
    "another key": _changed(key={"model": "other"}),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_what_is_damaged_is_made_again(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    made = _made(tmp_path / "cache", b"mine")
    damage(made.path)
    assert EngineCache(tmp_path / "cache").find(KEY, ".pt2") is None
    assert _made(tmp_path / "cache", b"again").path.read_bytes() == b"again"
    found = EngineCache(tmp_path / "cache").find(KEY, ".pt2")
    assert found is not None and found.path.read_bytes() == b"again" and found.notes == {"ms": [1.5, float("inf")]}


@pytest.mark.parametrize("what", ["a folder as package", "a folder as record", "a folder as lock", "a file as folder"])
def test_what_cannot_be_made_again_is_one_line(tmp_path: Path, what: str) -> None:
    path = _made(tmp_path / "cache", b"mine").path
    lock = path.with_name(f"{path.name}.lock")
    if what == "a file as folder":
        shutil.rmtree(tmp_path / "cache")
        (tmp_path / "cache").write_bytes(b"")
    else:
        taken = {"a folder as package": path, "a folder as record": _record(path), "a folder as lock": lock}[what]
        path.unlink()
        taken.unlink(missing_ok=True)
        taken.mkdir()
    with pytest.raises(InputError) as refused:
        _made(tmp_path / "cache", b"again")
    assert str(refused.value).startswith(str(tmp_path / "cache")) and str(refused.value).isprintable()


def test_a_link_that_is_exchanged_after_the_check_leads_nowhere_else(tmp_path: Path) -> None:
    _made(tmp_path / "mine", b"mine")
    _made(tmp_path / "theirs", b"theirs")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "mine")
    cache = EngineCache(link)
    link.unlink()
    link.symlink_to(tmp_path / "theirs")
    found = cache.find(KEY, ".pt2")
    assert found is not None and found.path == tmp_path / "mine" / found.path.name
    assert found.path.read_bytes() == b"mine"


@pytest.mark.parametrize("name", ["package", "record"])
@pytest.mark.parametrize("what", ["link", "writable", "fifo"])
def test_a_file_that_others_may_have_written_is_not_there(tmp_path: Path, name: str, what: str) -> None:
    path = _made(tmp_path / "cache", b"mine").path
    path = path if name == "package" else path.with_name(f"{path.name}.json")
    if what == "link":
        shutil.move(path, tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    elif what == "writable":
        path.chmod(0o666)
    else:
        path.unlink()
        os.mkfifo(path)
    assert EngineCache(tmp_path / "cache").find(KEY, ".pt2") is None


def test_a_file_or_folder_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _made(tmp_path / "cache", b"mine")
    cache, me = EngineCache(tmp_path / "cache"), os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: me + 1)
    assert cache.find(KEY, ".pt2") is None
    with pytest.raises(InputError, match="belongs to another user"):
        EngineCache(tmp_path / "cache")


def test_compilers_keep_what_they_make_in_a_private_folder_of_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "anybody's"))
    folder = EngineCache(tmp_path / "cache").compilers()
    assert folder.parent == tmp_path / "cache" and folder.stat().st_mode & 0o777 == 0o700
    with inductor_cache(folder):
        assert cache_dir() == str(folder)
    assert cache_dir() == str(tmp_path / "anybody's")
    folder.chmod(0o777)
    with pytest.raises(InputError, match="others may write to"):
        EngineCache(tmp_path / "cache").compilers()
