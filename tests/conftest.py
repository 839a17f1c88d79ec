"""What all tests share: one thread, hypothesis without a stopwatch, and the folder of real footage."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("gemel", deadline=None, max_examples=50)
settings.load_profile("gemel")

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the repository."""
    return REPOSITORY


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real footage (GEMEL_DATA, else ../shared/data); skips, saying so, where there is none."""
    folder = Path(os.environ.get("GEMEL_DATA") or REPOSITORY.parent / "shared" / "data")
    if not (folder / "MANIFEST.json").is_file():
        pytest.skip("the real footage is not here: set GEMEL_DATA to its folder")
    return folder
