"""Processes in which torch, torchvision and SciPy cannot be imported, as where a box alone is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

BLOCK = """
import importlib.abc
import sys

BLOCKED = ("torch", "torchvision", "scipy", "onnxscript", "onnx_ir", "tests")


class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)


sys.meta_path.insert(0, Refuse())
"""


def block_torch(folder: Path, repository: Path) -> dict[str, str]:
    """The environment of processes that cannot import torch; `folder` is written for it."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(BLOCK)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(repository)]), "OMP_NUM_THREADS": "1"}


def run_python(
    environment: Mapping[str, str], *words: str, folder: Path, timeout_s: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run Python in such an environment."""
    command = [sys.executable, *words]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
    )
