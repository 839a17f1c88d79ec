"""The folder of valid files that hostile cases damage (samples.py)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hostile.samples import copy_house, write_house


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What commands keep for the next time lies here, not with the user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def whole_house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small valid file of every kind; not to be changed."""
    folder = tmp_path_factory.mktemp("house")
    write_house(folder)
    return folder


@pytest.fixture
def house(whole_house: Path, tmp_path: Path) -> Path:
    """A copy of it for one test."""
    folder = tmp_path / "house"
    copy_house(whole_house, folder)
    return folder
