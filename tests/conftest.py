"""Shared by all tests: one thread, test order, the time limit, hypothesis settings, the folder of real footage."""

from __future__ import annotations

import gc
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

from gemel.models.process import freeze_garbage_collector
from tests.browser import open_browser

torch.set_num_threads(1)
settings.register_profile("gemel", deadline=None, max_examples=50)
settings.load_profile("gemel")

REPOSITORY = Path(__file__).resolve().parent.parent
HEAVY = ("exhaustive", "slow")
"""Markers, the heaviest first."""
STARTED = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--within SECONDS`: for machines of unknown speed."""
    parser.addoption("--within", type=float, metavar="SECONDS", help="skip tests that would start later than this")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that starts too late, with its fixtures."""
    within = item.config.getoption("within")
    if within is not None and time.monotonic() - STARTED > within:
        pytest.skip(f"{within:g} seconds are over: `make test-all` runs it")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run files with heavy tests first, so that no worker ends with one alone."""
    heaviest: dict[Path, int] = {}
    for item in items:
        rank = next((rank for rank, marker in enumerate(HEAVY) if item.get_closest_marker(marker)), len(HEAVY))
        heaviest[item.path] = min(rank, heaviest.get(item.path, rank))
    items.sort(key=lambda item: heaviest[item.path])


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect no garbage while the test modules are imported; leave their objects out of every later collection."""
    gc.disable()
    yield
    gc.enable()
    freeze_garbage_collector()


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the repository."""
    return REPOSITORY


@pytest.fixture(scope="session")
def project(repository: Path) -> dict[str, Any]:
    """pyproject.toml, parsed; Python 3.10 has no TOML reader, pytest brings one."""
    reader = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    return reader.loads((repository / "pyproject.toml").read_text())


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real footage (GEMEL_DATA, else ../shared/data); skipped with the reason where absent."""
    folder = Path(os.environ.get("GEMEL_DATA") or REPOSITORY.parent / "shared" / "data")
    if not (folder / "MANIFEST.json").is_file():
        pytest.skip("the real footage is not here: set GEMEL_DATA to its folder")
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium; skipped with the reason where absent."""
    with open_browser() as opened:
        yield opened
