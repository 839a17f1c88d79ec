"""Loads: what is on its way into the arena; what arrives is counted and put in order, what does not is forgotten."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from edge_runtime.memory.copies import Copy
from edge_runtime.memory.movers.base import Mover, Transfer
from edge_runtime.memory.residency import Residency
from edge_runtime.memory.views import Views


class Loads:
    """Transfers that are not done with, in the order they were begun.

    Counts the stored bytes that arrived (`bytes_moved`) and the seconds that the copies took (`load_s`).
    """

    def __init__(self, mover: Mover, residency: Residency, views: Views) -> None:
        self._mover, self.residency, self._views = mover, residency, views
        self._under_way: list[Transfer] = []
        self.bytes_moved = 0
        self.load_s = 0.0

    @property
    def names(self) -> frozenset[str]:
        """The tensors that may still be on their way."""
        return frozenset().union(*(transfer.names for transfer in self._under_way))

    def begin(self, copies: Sequence[Copy], waits: bool = False) -> None:
        """Begin copies, after those begun before; `waits` says that `finish` comes next."""
        transfer = self._mover.start(copies, waits)
        self._under_way.append(transfer)
        self._views.arriving(transfer.names, self.residency.placed)

    def arriving(self, names: Iterable[str]) -> bool:
        """Whether any of these tensors may still be on its way."""
        return any(not transfer.names.isdisjoint(names) for transfer in self._under_way)

    def wait(self, names: Iterable[str]) -> None:
        """Return when what is started next may read these tensors; OSError when their bytes could not be read."""
        names = tuple(names)
        for transfer in self._under_way:
            transfer.wait(names)
        self._views.arrived(names)

    def finish(self, names: Collection[str] | None = None) -> None:
        """Wait for all transfers, or for those that bring any of these names.

        OSError when bytes could not be read: what did not arrive is no longer resident.
        """
        for transfer in list(self._under_way):
            if names is None or not transfer.names.isdisjoint(names):
                try:
                    transfer.finish()
                finally:
                    self._end(transfer)

    def keep_only(self, wanted: Collection[str]) -> None:
        """Cut short what brings anything but these tensors, and what failed, so that it is read again."""
        for transfer in list(self._under_way):
            if transfer.failed or not transfer.names <= frozenset(wanted):
                self._end(transfer)

    def cut_short(self) -> None:
        """Cut short everything."""
        for transfer in list(self._under_way):
            self._end(transfer)

    def _end(self, transfer: Transfer) -> None:
        """Begin nothing more of a transfer, count what arrived, and forget what did not."""
        transfer.cancel()
        self._under_way.remove(transfer)
        lost = transfer.lost()
        self.load_s += transfer.seconds()
        self.bytes_moved += sum(self.residency.extents[name].nbytes for name in transfer.names - lost)
        self.residency.evict(lost)
        self._views.lost(lost)
        self._views.arrived(transfer.names)
