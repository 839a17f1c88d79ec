"""Many small plays on the virtual clock, on all cores; what is recorded of the same code is not played again."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from gemel import edge_runtime
from gemel.models.files.io import open_atomic

Row = dict[str, Any]
Unit = tuple[str, ...]
ROOMS = ("policies", "scheduler", "simulation")
CODE_DIGITS = 12


def code_of(*files: str) -> str:
    """A digest of the schedule's code and of these files, which recorded rows depend on."""
    root = Path(next(iter(edge_runtime.__path__)))
    paths = [path for room in ROOMS for path in sorted((root / room).rglob("*.py"))]
    paths += [root / "memory/allocator.py", root / "queues.py", *map(Path, files)]
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in paths)).hexdigest()[:CODE_DIGITS]


def read_records(file: Path, asked: Mapping[str, Any]) -> dict[str, list[Row]]:
    """The rows that the file has of each unit, none where its parameters or its code differ."""
    if not file.exists():
        return {}
    kept = json.loads(file.read_text(encoding="utf-8"))
    same = all(kept["asked"].get(key) == value for key, value in asked.items())
    return dict(kept["units"]) if same else {}


def play(
    units: Sequence[Unit], work: Callable[..., list[Row]], asked: Mapping[str, Any], file: Path,
    workers: int | None = None, tell: Callable[[str], None] = print,
) -> list[Row]:  # fmt: skip
    """The rows of all units, in order: `work(*unit)` gives those of one. Written whole after each of them.

    `asked` is what the rows depend on beside their unit, plain values. `tell` is called with the progress.
    """
    asked = json.loads(json.dumps(asked))
    names = {"/".join(unit): unit for unit in units}
    known = {name: rows for name, rows in read_records(file, asked).items() if name in names}
    left = {name: unit for name, unit in names.items() if name not in known}
    started = time.monotonic()
    tell(f"{len(known)} of {len(names)} are recorded in {file}")
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers or os.cpu_count(), spawn, signal.signal, (signal.SIGINT, signal.SIG_DFL)) as pool:
        running = {pool.submit(work, *unit): name for name, unit in left.items()}
        try:
            for future in as_completed(running):
                known[running[future]] = future.result()
                tell(f"{len(known)} of {len(names)}, {time.monotonic() - started:.0f} s: {running[future]}")
                _write(file, asked, known, names)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            known |= {name: one.result() for one, name in running.items() if one.done() and not _failed(one)}
            _write(file, asked, known, names)
            raise
    return [row for name in names for row in known[name]]


def _failed(future: Future[list[Row]]) -> bool:
    return future.cancelled() or future.exception() is not None


def _write(file: Path, asked: Mapping[str, Any], known: Mapping[str, list[Row]], names: Iterable[str]) -> None:
    units = {name: known[name] for name in names if name in known}
    document = {"asked": asked, "date": time.strftime("%Y-%m-%d", time.gmtime()), "units": units}
    lines = json.dumps(document).replace('], "', '],\n"')
    with open_atomic(file, overwrite=True) as out:
        out.write(lines.encode() + b"\n")
