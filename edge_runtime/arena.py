"""The arena: one preallocated piece of device memory, and the copies into it from the mapped bundle."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from edge_runtime.residency import Move, Placement, Residency

# Compaction moves bytes through a buffer of this size, since source and target may overlap.
BOUNCE_BYTES = 4 * 2**20


class Arena:
    """Resident tensors in `capacity_bytes` of a device ("cpu" or "cuda").

    `stored` gives a tensor by name as it is kept (a view of the mapped bundle).

    Counts the stored bytes moved into the arena (`bytes_moved`), loads that moved any (`swaps`), the bytes that
    compaction moved inside it (`compacted_bytes`, apart) and the most bytes resident at once.
    """

    def __init__(self, stored: Callable[[str], Tensor], capacity_bytes: int,
                 device: str | torch.device = "cpu") -> None:
        self._stored = stored
        self.device = torch.device(device)
        self.residency = Residency(capacity_bytes)
        # Written to, so that the memory is really there and the first loads do not pay for it.
        self._memory = torch.empty(self.residency.capacity_bytes, dtype=torch.uint8, device=self.device).zero_()
        self._views: dict[str, Tensor] = {}
        self.bytes_moved = self.swaps = self.compactions = self.compacted_bytes = self.max_resident_bytes = 0

    def change(self, evict: Sequence[str], load: Sequence[str]) -> int:
        """Forget the tensors of `evict`, then copy in those of `load`; returns the bytes moved.

        Where no hole is large enough the arena is compacted. MemoryError when it is full even so, which the
        schedule rules out; what was loaded by then stays.
        """
        self.residency.evict(evict)
        for name in evict:
            self._views.pop(name, None)
        moved = 0
        for name in load:
            tensor = self._stored(name)
            placement = self._place(name, tensor.nbytes)
            self._bytes_at(placement).copy_(tensor.reshape(-1).view(torch.uint8))
            moved += tensor.nbytes
        self.bytes_moved += moved
        self.swaps += bool(load)
        self.max_resident_bytes = max(self.max_resident_bytes, self.residency.resident_bytes)
        self.synchronise()
        return moved

    def tensor(self, name: str) -> Tensor:
        """A resident tensor as a view of the arena; the same object until the tensor is evicted or moved."""
        view = self._views.get(name)
        if view is None:
            stored = self._stored(name)
            view = self._bytes_at(self.residency.placement(name)).view(stored.dtype).view(stored.shape)
            self._views[name] = view
        return view

    def synchronise(self) -> None:
        """Wait until the device has done all it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _place(self, name: str, nbytes: int) -> Placement:
        placement = self.residency.place(name, nbytes)
        if placement is None:
            self._compact()
            placement = self.residency.place(name, nbytes)
        if placement is None:
            held = f"{self.residency.resident_bytes} of {self.residency.capacity_bytes} bytes are taken"
            raise MemoryError(f"no room for the {nbytes} bytes of tensor {name}: {held}")
        return placement

    def _bytes_at(self, placement: Placement) -> Tensor:
        return self._memory[placement.offset:placement.offset + placement.nbytes]

    def _compact(self) -> None:
        self.compactions += 1
        for move in self.residency.compact():
            self._slide(move)
            self._views.pop(move.name, None)
            self.compacted_bytes += move.nbytes

    def _slide(self, move: Move) -> None:
        """Copy piece by piece from the low end: targets lie below their sources, so nothing unread is overwritten."""
        for at in range(0, move.nbytes, BOUNCE_BYTES):
            size = min(BOUNCE_BYTES, move.nbytes - at)
            piece = self._memory[move.source + at:move.source + at + size].clone()
            self._memory[move.target + at:move.target + at + size] = piece
