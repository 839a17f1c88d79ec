"""The device that everything is trained and judged on."""

from __future__ import annotations

import torch


def default_device() -> torch.device:
    """The GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
