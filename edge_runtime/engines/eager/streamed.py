"""Copies to a card of what overflows: out of the bundle's file into pinned memory, and from there on a stream apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

BUFFERS = 2
"""While one is being copied from, the next tensor is read into the other."""


class Streamed:
    """Brings tensors of `most_bytes` at most, one after the other, to a device.

    The processor reads ahead while the card computes; it waits only for a buffer that is still being copied from. The
    copy waits for all that is computed before, since it overwrites what another layer used; what is computed next
    waits for the copy. `cuda` is torch.cuda, or what stands in for it.
    """

    def __init__(self, most_bytes: int, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda, self._stream = device, cuda, cuda.Stream(device)
        pinned = device.type == "cuda"
        self._buffers = [torch.empty(most_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(BUFFERS)]
        self._copied: list[Any] = [None] * BUFFERS
        self._turn = 0

    def copied(self, read: Callable[[Tensor], Tensor], room: Tensor) -> Tensor:
        """What `read` puts into memory it is given (uint8), in `room` (uint8, its bytes) on the device."""
        self._turn = (self._turn + 1) % BUFFERS
        left = self._copied[self._turn]
        if left is not None:
            left.synchronize()
        read_there = read(self._buffers[self._turn][: room.numel()])
        target = room.view(read_there.dtype).view(read_there.shape)
        computing = self._cuda.current_stream(self._device)
        self._stream.wait_stream(computing)
        with self._cuda.stream(self._stream):
            target.copy_(read_there, non_blocking=True)
            event = self._cuda.Event()
            event.record(self._stream)
        computing.wait_event(event)
        self._copied[self._turn] = event
        return target
