"""What the distillation of these workloads' detectors has in common."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def divergence(logits: Tensor, teacher: Tensor) -> Tensor:
    """Of two probabilities given as logits; zero where they are equal."""
    wanted = teacher.sigmoid()
    least = F.binary_cross_entropy_with_logits(teacher, wanted, reduction="none")
    return F.binary_cross_entropy_with_logits(logits, wanted, reduction="none") - least
