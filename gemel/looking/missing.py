"""What a workload names that is not there, or does not fit: no fault for `inspect`, but one for what comes after."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from models.data import SPLITS, load_split
from models.errors import InputError
from models.video import is_path
from models.weights import Published, check_weights
from models.workload import Query, Workload
from models.zoo import build_query


def missing(workload: Workload) -> tuple[str, ...]:
    """One line for each: the file, the key, what is wrong with it, what to do. Nothing is downloaded or decoded."""
    found = [*_cameras(workload)]
    for query in workload.queries:
        found += [*_weights(query, workload.path), *_data(query, workload.path)]
    return tuple(str(error) for error in found)


def _cameras(workload: Workload) -> Iterator[InputError]:
    for camera in workload.cameras.values():
        if is_path(camera.source) and not os.path.exists(camera.source):
            key = f"cameras.{camera.id}.source"
            yield InputError(workload.path, f"{camera.source} does not exist", "correct the path", key)


def _weights(query: Query, file: Path) -> Iterator[InputError]:
    key, remedy = f"weights ({query.id})", "correct the path, or let `gemel train` write it"
    if query.weights is None:
        yield InputError(file, "none are named", "name a file: `gemel train` writes it, `gemel merge` reads it", key)
    elif isinstance(query.weights, Published):
        return
    elif not query.weights.is_file():
        yield InputError(file, f"{query.weights} does not exist", remedy, key)
    else:
        yield from _raised(lambda: check_weights(query, build_query(query, "meta")))


def _data(query: Query, file: Path) -> Iterator[InputError]:
    key = f"data ({query.id})"
    if query.data is None:
        yield InputError(file, "no frames are named", "name a folder or a video: training and merging need it", key)
    elif not query.data.exists():
        yield InputError(file, f"{query.data} does not exist", "correct the path, or put frames there", key)
    elif any((query.data / split).is_dir() for split in SPLITS):
        for split in SPLITS:
            yield from _raised(lambda split=split: load_split(query, split))


def _raised(check: Callable[[], object]) -> Iterator[InputError]:
    try:
        check()
    except InputError as error:
        yield error
