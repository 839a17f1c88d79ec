"""Small tensors on their way to where something is computed."""

from __future__ import annotations

import torch
from torch import Tensor


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor there; to a card it goes from pinned memory, so that the processor does not wait for what runs."""
    if device.type != "cuda" or tensor.device == device:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
