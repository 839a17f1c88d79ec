"""A tiny workload with trained originals, made once for all tests of the merger."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from merger import TrainOptions, train_originals
from models.workload import Workload, load_workload
from tests.merger.tiny import write_workload

torch.set_num_threads(1)
QUICK = TrainOptions(rate=3e-3, passes=360, max_cycles=1)


@pytest.fixture(scope="session")
def trained_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a workload of three queries whose originals are trained."""
    folder = tmp_path_factory.mktemp("tiny")
    train_originals(load_workload(write_workload(folder, queries=3)), options=QUICK)
    return folder


@pytest.fixture
def workload(trained_folder: Path, tmp_path: Path) -> Workload:
    """A copy of the trained workload that a test may damage."""
    shutil.copytree(trained_folder, tmp_path / "tiny")
    return load_workload(tmp_path / "tiny" / "workload.yaml")
