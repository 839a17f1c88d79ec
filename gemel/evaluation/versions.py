"""What an evaluation ran with."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("gemel", "torch", "torchvision", "numpy", "opencv-python-headless")


def versions() -> dict[str, str]:
    """Python, the system, and the packages that figures depend on; what is not installed as a package is left out."""
    found = {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
