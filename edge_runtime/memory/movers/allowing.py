"""How much memory of a card torch's allocator may hold; beyond that it raises OutOfMemoryError."""

from __future__ import annotations

from typing import Any

import torch

ALLOCATOR_BYTES = 128 * 2**20
"""What it may hold beyond what it gives out: it takes 2 or 20 MiB at a time, for each stream apart."""


def allow(nbytes: int | None, device: torch.device, cuda: Any = torch.cuda) -> None:
    """Let it give out so many bytes, None: all there are. `cuda` is torch.cuda, or what stands in for it."""
    total = cuda.get_device_properties(device).total_memory
    allowed = total if nbytes is None else min(total, nbytes + ALLOCATOR_BYTES)
    cuda.set_per_process_memory_fraction(allowed / total, device.index or 0)  # it takes no "cuda" alone
