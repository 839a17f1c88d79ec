"""The bundle's bytes in memory that a card copies from by itself, each tensor in the order in which it is wanted."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from edge_runtime.memory.layout import Layout, Layouts
from edge_runtime.memory.placing import footprint_bytes
from edge_runtime.memory.store import Store

log = logging.getLogger("gemel.run")


class Pinned:
    """A copy of a store's data, registered with the driver: torch's own pinned memory would round up to 2^n bytes.

    Where that fails it is ordinary memory, which is said once. `cuda` is torch.cuda, or what stands in for it. Raises
    OSError when the store cannot be read.
    """

    def __init__(self, store: Store, device: torch.device, cuda: Any) -> None:
        self._store, self._cuda = store, cuda
        self.bytes = torch.empty(footprint_bytes(store.data.nbytes), dtype=torch.uint8)
        self._lying: dict[int, Layout] = {}
        store.read(0, self.bytes[: store.data.nbytes].numpy())
        self._registered = False
        if not self.bytes.nbytes:
            return
        code = int(cuda.cudart().cudaHostRegister(self.bytes.data_ptr(), self.bytes.nbytes, 0))
        self._registered = not code
        if code:
            log.warning("the bundle's %d bytes could not be pinned: loads will be slower", store.data.nbytes)
            _forget_error(device)

    def lay(self, layouts: Layouts) -> None:
        """Put the tensors in these orders; nothing may be copied meanwhile. Those stored once lie in one order."""
        extents = self._store.extents
        wanted = {extents[name].offset: layout for name, layout in layouts.items() if layout.arranged}
        for offset, layout in self._lying.items():
            if wanted.get(offset) != layout:
                layout.restore(self._whole(layout), offset)
        for offset, layout in wanted.items():
            if self._lying.get(offset) != layout:
                layout.arrange(self._whole(layout), offset)
        self._lying = wanted

    def close(self) -> None:
        """Let the driver forget the memory."""
        if self._registered:
            self._registered = False
            self._cuda.cudart().cudaHostUnregister(self.bytes.data_ptr())

    def _whole(self, layout: Layout) -> Tensor:
        return self.bytes.view(layout.dtype)


def _forget_error(device: torch.device) -> None:
    """The runtime keeps the error of a failed call and gives it to whoever launches the next kernel, once."""
    with suppress(RuntimeError):
        torch.zeros(1, device=device).add_(1)
