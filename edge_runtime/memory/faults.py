"""What a failure of the device is called, in every form it comes in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from models.device import is_out_of_memory


@contextmanager
def telling_out_of_memory(device: torch.device) -> Iterator[None]:
    """Code compiled by AOTInductor fails with a RuntimeError that does not say why: OutOfMemoryError where torch's
    allocator has counted one meanwhile. On a card alone.
    """
    before = _refused(device)
    try:
        yield
    except RuntimeError as error:
        if _refused(device) > before and not is_out_of_memory(error):
            raise torch.OutOfMemoryError(f"CUDA out of memory in compiled code: {error}") from error
        raise


def _refused(device: torch.device) -> int:
    """How often the allocator had to refuse so far."""
    return torch.cuda.memory_stats(device).get("num_ooms", 0) if device.type == "cuda" else 0
