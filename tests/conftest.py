"""What all tests share: one thread, order and time, hypothesis without a stopwatch, and the folder of real footage."""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from tests.browsing import opened_browser

torch.set_num_threads(1)
settings.register_profile("gemel", deadline=None, max_examples=50)
settings.load_profile("gemel")

REPOSITORY = Path(__file__).resolve().parent.parent
HEAVY = ("exhaustive", "slow")
"""Markers, the heaviest first."""
BEGAN = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--within SECONDS`, for a machine of which nobody knows how fast it is."""
    parser.addoption("--within", type=float, metavar="SECONDS", help="skip what would begin after so many seconds")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what begins too late, fixtures and all."""
    within = item.config.getoption("within")
    if within is not None and time.monotonic() - BEGAN > within:
        pytest.skip(f"{within:g} seconds are over: `make test-all` runs it")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with heavy tests first: of two workers neither is left alone with one at the end."""
    heaviest: dict[Path, int] = {}
    for item in items:
        rank = next((rank for rank, marker in enumerate(HEAVY) if item.get_closest_marker(marker)), len(HEAVY))
        heaviest[item.path] = min(rank, heaviest.get(item.path, rank))
    items.sort(key=lambda item: heaviest[item.path])


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the repository."""
    return REPOSITORY


@pytest.fixture(scope="session")
def project(repository: Path) -> dict[str, Any]:
    """What pyproject.toml says; Python 3.10 has no reader of its own, pytest brings one there."""
    reader = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    return reader.loads((repository / "pyproject.toml").read_text())


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real footage (GEMEL_DATA, else ../shared/data); skips, saying so, where there is none."""
    folder = Path(os.environ.get("GEMEL_DATA") or REPOSITORY.parent / "shared" / "data")
    if not (folder / "MANIFEST.json").is_file():
        pytest.skip("the real footage is not here: set GEMEL_DATA to its folder")
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium; skips, saying so, where there is none."""
    with opened_browser() as opened:
        yield opened
