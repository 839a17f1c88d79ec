"""Prepares the graphs of a bundle once for this processor, in a process of its own, and keeps them in the cache."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from filelock import FileLock
from pydantic import TypeAdapter, ValidationError

from gemel import models
from gemel.edge_runtime.engines.prepared import (
    MAKING,
    PreparationError,
    PreparedBundle,
    PreparedIndex,
    folder_of,
    preparation_key,
    publish,
    read_prepared,
    remove_old,
    remove_tree,
    write_index,
)
from gemel.models.bundle import Bundle
from gemel.models.errors import InputError, exact_text, one_line
from gemel.models.files.io import describe_problem

CHILD = "gemel.edge_runtime.engines.prepare_child"
TIMEOUT_S = 3600.0
ROOM_FACTOR = 3.5
"""Times the weights of all queries one by one that preparing needs on the disk at most: a copy, a laid out copy with
packed blocks, and the file."""

log = logging.getLogger("gemel.run")
_INDEX = TypeAdapter(PreparedIndex)


def prepare_bundle(bundle: Bundle, threads: int = 1) -> PreparedBundle:
    """The prepared graphs of a bundle, from the cache or made now: seconds for each query, in a process of its own.

    Raises InputError where the bundle has no graph, the cache cannot be used, the disk has no room, or nothing could be
    prepared. Queries that could not be prepared are in `index.failed`.
    """
    check_documents(bundle)
    key = preparation_key(bundle)
    folder = folder_of(key)
    prepared = find_prepared(bundle)
    if prepared is not None:
        return prepared
    with describe_problem(folder), FileLock(f"{folder}.lock", mode=0o600):
        prepared = find_prepared(bundle)  # another process may have made it meanwhile
        if prepared is not None:
            return prepared
        _check_room(bundle, folder.parent)
        making = folder.with_name(f"{MAKING}{secrets.token_hex(8)}")
        making.mkdir(mode=0o700)
        try:
            index = _run_children(bundle, making, threads)
            write_index(making, replace(index, key=key))
            publish(making, folder)
        finally:
            remove_tree(making)
        prepared = read_prepared(folder, key)
        remove_old(folder)
    return prepared


def find_prepared(bundle: Bundle) -> PreparedBundle | None:
    """The prepared graphs of a bundle in the cache; None where there are none, or they cannot be trusted (logged)."""
    key = preparation_key(bundle)
    folder = folder_of(key)
    try:
        return read_prepared(folder, key)
    except FileNotFoundError:
        return None
    except PreparationError as error:
        log.warning("%s: %s; it is prepared anew", folder, error)
        return None


def check_documents(bundle: Bundle) -> None:
    """Raise InputError for a bundle none of whose queries has its network in it."""
    if not any(query.network_document is not None for query in bundle.queries):
        raise InputError(bundle.path, "holds no networks", "merge it again; an older bundle runs with gemel[merge]")


def _check_room(bundle: Bundle, folder: Path) -> None:
    nbytes = sum(bundle.nbytes(name) for query in bundle.queries for name in set(query.places().values()))
    needed, free = int(ROOM_FACTOR * nbytes), shutil.disk_usage(folder).free
    if free < needed:
        problem = f"has {exact_text(free)} free, and preparing {bundle.path} takes up to {exact_text(needed)}"
        raise InputError(folder, problem, "make room, or set XDG_CACHE_HOME to a folder on another disk")


def _run_children(bundle: Bundle, folder: Path, threads: int) -> PreparedIndex:
    """Prepare in a child; a query that ends it is left out, and the others are prepared again."""
    crashed: dict[str, str] = {}
    while True:
        for path in folder.iterdir():
            remove_tree(path) if path.is_dir() else path.unlink()
        query, reason = _run_child(bundle, folder, threads, list(crashed))
        if reason is None:
            break
        if query is None or query in crashed:
            raise InputError(bundle.path, f"could not be prepared: {reason}", "run `gemel bundle verify`")
        log.warning("query %s could not be prepared: %s", query, reason)
        crashed[query] = reason
    result = folder / "result.json"
    try:
        index = _INDEX.validate_json(result.read_bytes())
    except (OSError, ValidationError) as error:
        raise InputError(bundle.path, "could not be prepared: the process gave no result") from error
    result.unlink()
    index = replace(index, failed={**crashed, **index.failed})
    if not index.queries:
        query, reason = next(iter(index.failed.items()))
        raise InputError(bundle.path, f"could not be prepared: query {query}: {reason}", "run `gemel bundle verify`")
    return index


def _run_child(bundle: Bundle, folder: Path, threads: int, skipped: list[str]) -> tuple[str | None, str | None]:
    """The query that a child was at when it ended, and why it failed; None where it did not."""
    root = Path(models.__file__).parent.parent.parent  # the folder that holds gemel/
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, "-m", CHILD, str(bundle.path.resolve()), str(folder), str(threads), *skipped]
    try:
        # Started in a folder of this user alone: Python looks for modules in the current one first.
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None, f"it took more than {TIMEOUT_S:.0f} s"
    names = done.stdout.split()
    query = names[-1] if names else None
    if done.returncode == 0:
        return query, None
    if done.returncode < 0:
        return query, f"the process ended with {signal.Signals(-done.returncode).name}"
    lines = done.stderr.strip().splitlines()
    return None, one_line(lines[-1] if lines else f"exit code {done.returncode}")[:300]
