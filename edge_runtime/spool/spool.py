"""The spool at work: answers are offered while a box serves, and a thread of its own writes those that are sampled."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from edge_runtime.delivery.base import ERROR, UNREACHABLE, UNWRITABLE, not_taken
from edge_runtime.delivery.parcel import Parcel
from edge_runtime.spool.checked import FILE, Checked, read_checked
from edge_runtime.spool.sample import SUFFIX, sample_bytes, sample_name
from edge_runtime.spool.sampling import Choice, Sampling, answered, making_way
from edge_runtime.spool.settings import FILE_MODE, FOLDER_MODE, SpoolConfig
from models.bundle import BundleQuery
from models.errors import InputError
from models.io import describe_problem, open_atomic

WAITING = 16
"""Samples that wait to be written, each with its frame."""
POLL_INTERVAL_S = 5.0
"""How often the thread looks whether there was a drift check."""
BUSY, TOO_LARGE = "busy", "too_large"
"""Why an answer that was due is no sample, beside what the disk says: too many wait, one takes more than all may."""

log = logging.getLogger("gemel.run")


class Spool:
    """Keeps a picture with the answer of each query now and then, in a folder that never grows beyond its bound.

    What is in the way of that, a full disk or one that hangs, is counted in `unsampled` and told once; it holds up
    nobody who offers. `queries` are those that are served. `checked` is what the last drift check found.
    """

    def __init__(self, config: SpoolConfig, queries: Mapping[str, BundleQuery]) -> None:
        self.queries = queries
        self.checked: Checked | None = None
        self.samples, self.unsampled = 0, Counter[str]()
        self._config, self._sampling = config, Sampling(config.every_s)
        self._kept: deque[tuple[str, int]] = deque()
        self._nbytes = 0
        self._waiting: queue.Queue[tuple[Parcel, BundleQuery] | None] = queue.Queue(WAITING)
        self._stopping, self._look_at, self._seen = False, -math.inf, (0, 0)
        self._trouble: str | None = None
        self._reason = ERROR
        self._thread = threading.Thread(target=self._work, name="spool", daemon=True)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def offer(self, parcel: Parcel) -> None:
        """An answer, with the frame it was given to; call it from one thread. It takes microseconds."""
        name = str(parcel.record["query"])
        self._sampling, choice = answered(self._sampling, name, not self._waiting.full(), time.monotonic())
        if choice is Choice.NO_ROOM:
            self.unsampled[BUSY] += 1
        elif choice is Choice.TAKE and parcel.image is not None:
            self._waiting.put_nowait((parcel, self.queries[name]))

    def stop(self) -> None:
        """Write what waits, and end."""
        self._stopping = True
        with contextlib.suppress(queue.Full):  # then it is awake
            self._waiting.put_nowait(None)
        if self._thread.is_alive():
            self._thread.join()

    def to_json(self) -> dict[str, Any]:
        """How many `samples` were written, `unsampled` by reason, and the `bytes` of all that are kept."""
        return {"samples": self.samples, "unsampled": dict(sorted(self.unsampled.items())), "bytes": self._nbytes}

    def _work(self) -> None:
        self._attempt(self._find)
        while not (self._stopping and self._waiting.empty()):
            self._look(time.monotonic())
            with contextlib.suppress(queue.Empty):
                item = self._waiting.get(timeout=POLL_INTERVAL_S)
                if item is not None and not self._attempt(partial(self._keep, *item)):
                    self.unsampled[self._reason] += 1

    def _attempt(self, what: Callable[[], object]) -> bool:
        """Do it; whether that went well. What went wrong is told where it is news."""
        try:
            what()
        except Exception as error:
            reason, said = not_taken(error).reason, str(error) or type(error).__name__
            self._reason = UNWRITABLE if reason == UNREACHABLE else reason
            if said != self._trouble:
                log.error("spool: %s", said)
            self._trouble = said
            return False
        if self._trouble is not None:
            log.info("spool: samples are written again")
            self._trouble = None
        return True

    def _find(self) -> None:
        """What is there already; what was being written when a box was killed goes."""
        folder = self._own_folder()
        with describe_problem(folder):
            found = [(one.name, one.stat(follow_symlinks=False).st_size) for one in os.scandir(folder)]
        for name, _ in found:
            if name.startswith(".") and name.endswith(".tmp"):
                with describe_problem(folder / name):
                    os.unlink(folder / name)
        self._kept.extend(sorted(one for one in found if one[0].endswith(SUFFIX)))
        self._nbytes = sum(size for _, size in self._kept)

    def _keep(self, parcel: Parcel, query: BundleQuery) -> None:
        assert parcel.image is not None
        data = sample_bytes(parcel.record, parcel.image, query)
        gone = making_way([size for _, size in self._kept], len(data), self._config.max_bytes)
        if gone is None:
            self.unsampled[TOO_LARGE] += 1
            return
        folder = self._own_folder()
        for _ in range(gone):
            with describe_problem(folder), contextlib.suppress(FileNotFoundError):
                os.unlink(folder / self._kept[0][0])
            self._nbytes -= self._kept.popleft()[1]
        path = folder / sample_name(parcel.record)
        with open_atomic(path, overwrite=True) as file:
            os.fchmod(file.fileno(), FILE_MODE)
            file.write(data)
        self._kept.append((path.name, len(data)))
        self._nbytes += len(data)
        self.samples += 1

    def _own_folder(self) -> Path:
        """The folder of the samples, which nobody else looks into; made where it is not there."""
        folder = self._config.samples
        with describe_problem(folder):
            folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
            opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                os.fchmod(opened, FOLDER_MODE)
            finally:
                os.close(opened)
        return folder

    def _look(self, now: float) -> None:
        """Read what a drift check left, where it is another than before."""
        if now < self._look_at:
            return
        self._look_at = now + POLL_INTERVAL_S
        try:
            found = os.stat(self._config.path / FILE)
            if self._seen == (seen := (found.st_mtime_ns, found.st_ino)):
                return
            self._seen, self.checked = seen, None
            self.checked = read_checked(self._config.path)
        except OSError:  # there was none
            self.checked = None
        except InputError as error:
            log.warning("%s", error)
