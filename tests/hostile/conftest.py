"""The folder of valid files that hostile cases damage (samples.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hostile.samples import copy_house, write_house


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
