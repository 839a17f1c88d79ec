"""Watches over the file of the served bundle: whether it was changed in place, or its bytes by themselves."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable

from edge_runtime.integrity.hashing import damaged_tensors, is_sound, tensors_of
from edge_runtime.integrity.trust import Trust, found_bad, hashed, is_due, looked
from models.bundle import Bundle

POLL_INTERVAL_S = 0.2
BYTES_PER_S = 8 * 2**20
"""How fast tensors are hashed again while nothing is known to be wrong: about a hundredth of a core."""
REMEDY = "put a new bundle under another name, or rename it into place, and reload"

log = logging.getLogger("gemel.run")


class Vigil:
    """`trust` is what is believed at present. `look` may be called from any thread, before every decision.

    A file that was changed in place is hashed again once it stands still: what is as it was is trusted again.
    """

    def __init__(
        self,
        bundle: Bundle,
        bad: frozenset[str] = frozenset(),
        clock: Callable[[], float] = time.monotonic,
        bytes_per_s: float = BYTES_PER_S,
    ) -> None:
        self._bundle, self._clock, self._bytes_per_s = bundle, clock, bytes_per_s
        stamp = bundle.file.proven or bundle.file.opened_as
        self.trust = Trust(stamp, bad, stamp, clock())
        self._first = bad
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name="vigil", daemon=True)

    def start(self) -> None:
        """Begin to hash, at leisure."""
        self._thread.start()

    def stop(self) -> None:
        """End soon; returns at once."""
        self._stopping.set()

    @property
    def fault(self) -> str | None:
        """What became of the file since it was opened, in a line; None while all is well."""
        trust = self.trust
        if trust.doubted:
            return f"{self._bundle.path} was changed in place: nothing is loaded from it; {REMEDY}"
        if trust.bad != self._first:
            count = len(trust.bad)
            tensors = "a tensor" if count == 1 else f"{count} tensors"
            return f"{self._bundle.path}: {tensors} changed in place: they are not loaded; {REMEDY}"
        return None

    def look(self) -> Trust:
        """Look at the file, without reading it: what is believed now."""
        stamp = self._bundle.file.stamp()
        if stamp != self.trust.seen:
            self._change(lambda trust: looked(trust, stamp, self._clock()))
        return self.trust

    def _change(self, to: Callable[[Trust], Trust]) -> None:
        """Believe something else, and say so where that is news."""
        with self._lock:
            before, self.trust = self.fault, to(self.trust)
            after = self.fault
            if not self.trust.doubted:
                self._bundle.file.proven = self.trust.proven
        if after is not None and after != before:
            log.error("%s", after)
        elif after is None and before is not None:
            log.info("%s is as it was when it was opened", self._bundle.path)

    def _work(self) -> None:
        entries = tensors_of(self._bundle)
        for entry in itertools.cycle(entries):
            while not self._stopping.wait(POLL_INTERVAL_S) and self.look().doubted:
                if is_due(self.trust, self._clock()):
                    self._hash_all()
            if self._stopping.is_set():
                return
            stamp = self._bundle.file.stamp()
            sound = is_sound(self._bundle, entry, self._rest)
            if not sound and self._bundle.file.stamp() == stamp:
                self._change(lambda trust, entry=entry, stamp=stamp: found_bad(trust, stamp, entry.name))

    def _hash_all(self) -> None:
        before = self._bundle.file.stamp()
        bad = damaged_tensors(self._bundle)
        after = self._bundle.file.stamp()
        self._change(lambda trust: hashed(trust, before, after, bad))

    def _rest(self, nbytes: int) -> None:
        self._stopping.wait(nbytes / self._bytes_per_s)
