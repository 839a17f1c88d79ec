"""What pip leaves of a package with entry points: a folder on Python's path with its metadata, and its code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest


def install(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, groups: Mapping[str, Mapping[str, str]], **files: str
) -> Path:
    """Install `name` 1.0 with these entry points by group, and these modules, beside what is installed."""
    metadata = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [line for group, entries in groups.items() for line in (f"[{group}]", *map(" = ".join, entries.items()))]
    (metadata / "entry_points.txt").write_text("\n".join([*lines, ""]))
    for module, text in files.items():
        (folder / f"{module}.py").write_text(text)
    monkeypatch.syspath_prepend(folder)
    return folder
