"""Packages that are installed beside a box's own libraries, and the error where one is missing."""

from __future__ import annotations

import ctypes
import sys
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from gemel.models.errors import InputError

MERGE = "gemel[merge]"
"""Installs what merging, training and evaluation need: torch, torchvision and SciPy."""


def find_package(name: str) -> ModuleSpec | None:
    """Where a package is, which is not imported; None where it is not installed."""
    try:
        return find_spec(name)
    except (ImportError, ValueError):
        return None


def is_installed(package: str) -> bool:
    """Whether a package can be imported; it is not."""
    return find_package(package) is not None


def version_of(package: str) -> str:
    """The version of a package, which is not imported; empty where it is not installed."""
    try:
        return version(package) if is_installed(package) else ""
    except PackageNotFoundError:
        return ""


def has_cuda() -> bool:
    """Whether torch is installed and has a GPU; torch is imported only where there is a driver for one."""
    if "torch" not in sys.modules and not (is_installed("torch") and has_cuda_driver()):
        return False
    import torch

    return torch.cuda.is_available()


def has_cuda_driver() -> bool:
    """Whether the system has the driver of a GPU of NVIDIA."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def require_merge(feature: str) -> None:
    """Raise InputError where `feature` needs torch and only a box's libraries are installed."""
    if not is_installed("torchvision"):
        raise InputError(
            feature, "needs torch, which is not installed here", f"pip install {MERGE}"
        )
