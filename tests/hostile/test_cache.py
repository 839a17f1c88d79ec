"""The engines' cache, whose files are run as code: what was checked is what is used, and it is this user's own."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from edge_runtime.engines.cache import EngineCache, Kept
from edge_runtime.engines.compiled.making import compiling_in
from models.errors import InputError

KEY = {"model": "resnet18"}


def _made(folder: Path, content: bytes) -> Kept:
    def make(path: Path) -> dict[str, int]:
        path.write_bytes(content)
        return {}

    return EngineCache(folder).fetch(KEY, ".pt2", make)


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
    with compiling_in(folder):
        assert cache_dir() == str(folder)
    assert cache_dir() == str(tmp_path / "anybody's")
    folder.chmod(0o777)
    with pytest.raises(InputError, match="others may write to"):
        EngineCache(tmp_path / "cache").compilers()
