"""A transfer in which nothing happens until the test says so: tensors arrive one by one, or fail."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gemel.edge_runtime.memory.allocator import Copy
from gemel.edge_runtime.memory.store import Store
from gemel.edge_runtime.memory.transfer_cpu import CpuTransferBackend


class SlowTransfer(CpuTransferBackend):
    overlaps = True

    def __init__(self, store: Store, capacity_bytes: int) -> None:
        super().__init__(store, capacity_bytes)
        self._transfers: list[SlowTransferCopies] = []
        self.cancelled = 0

    def start(self, copies: Sequence[Copy], waits: bool = False, beside: bool = False) -> SlowTransferCopies:  # type: ignore[override]
        transfer = SlowTransferCopies(self, copies)
        self._transfers.append(transfer)
        return transfer

    def arrive(self, count: int) -> list[str]:
        """Let the next tensors arrive; returns which did."""
        arrived = []
        while count and self._transfers:
            transfer = self._transfers[0]
            if not transfer.waiting:
                self._transfers.pop(0)
                continue
            arrived.append(transfer.bring(self._store))
            count -= 1
        return arrived

    def fail(self, why: str) -> None:
        self._transfers.pop(0).fault = OSError(why)


class SlowTransferCopies:
    def __init__(self, transfer: SlowTransfer, copies: Sequence[Copy]) -> None:
        self._transfer = transfer
        self.fault: OSError | None = None
        self.waiting = [
            (name, copy, begin, end)
            for copy in copies
            for name, begin, end in zip(copy.names, (0, *copy.ends), copy.ends)
        ]
        self.names = frozenset(name for name, *_ in self.waiting)
        self.waited: list[str] = []

    @property
    def failed(self) -> bool:
        return self.fault is not None

    def bring(self, store: Store) -> str:
        name, copy, begin, end = self.waiting.pop(0)
        # From where the last one ended: what is before has arrived and may have been arranged since.
        store.read(copy.source + begin, self._transfer._bytes[copy.target + begin : copy.target + end])
        return name

    def wait(self, names: Iterable[str]) -> None:
        if self.fault:
            raise self.fault
        self.waited += [name for name in names if name in self.names]
        while self.missing_tensors() & set(names):
            self._transfer.arrive(1)

    def finish(self) -> None:
        self.wait(self.names)

    def cancel(self) -> None:
        if self.waiting:
            self._transfer.cancelled += 1
            if self in self._transfer._transfers:
                self._transfer._transfers.remove(self)

    def missing_tensors(self) -> frozenset[str]:
        return frozenset(name for name, *_ in self.waiting)

    def seconds(self) -> float:
        return 0.001
