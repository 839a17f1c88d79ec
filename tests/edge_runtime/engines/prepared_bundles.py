"""Bundles with documents, prepared once for the tests of prepared graphs, and tools to damage what was prepared."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from gemel.edge_runtime.engines.prepared import _INDEX, INDEX, WEIGHTS, PreparedBundle, PreparedIndex, write_index


def copy_prepared(prepared: PreparedBundle, folder: Path) -> Path:
    """A folder of the same files, which may be written to."""
    shutil.copytree(prepared.folder, folder)
    folder.chmod(0o700)
    for path in folder.iterdir():
        path.chmod(0o600)
    return folder


def read_index(folder: Path) -> PreparedIndex:
    """The index of a folder, unchecked."""
    return _INDEX.validate_json((folder / INDEX).read_bytes().partition(b"\n")[2])


def rewrite_index(folder: Path, index: PreparedIndex) -> None:
    """Write another index as the product would."""
    (folder / INDEX).chmod(0o600)
    write_index(folder, index)


def contents_read_by(index: PreparedIndex, *queries: str) -> set[int]:
    """The contents that exactly these queries read."""
    readers: dict[int, set[str]] = {}
    for query, prepared in index.queries.items():
        for content in prepared.reads:
            readers.setdefault(content, set()).add(query)
    return {content for content, names in readers.items() if names == set(queries)}


def scale_content(folder: Path, index: PreparedIndex, place: int, factor: float) -> None:
    """Multiply float32 weights in weights.bin."""
    content = index.contents[place]
    values = np.memmap(folder / WEIGHTS, np.float32, "r+", content.offset, (content.nbytes // 4,))
    values *= factor
    values.flush()
