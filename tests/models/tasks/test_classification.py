"""Frames of a classifier are changed at random, a whole batch at once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from models.tasks import MAX_SHIFT, Classification


def _one_by_one(images: Tensor, generator: torch.Generator) -> Tensor:
    size = images.shape[-1]
    reach = max(1, round(size * MAX_SHIFT))
    padded = F.pad(images.float(), (reach,) * 4, mode="replicate")
    offsets = torch.randint(0, 2 * reach + 1, (len(images), 2), generator=generator).tolist()
    gains = torch.empty(len(images)).uniform_(0.8, 1.2, generator=generator).tolist()
    rows = zip(padded, offsets, gains, strict=True)
    return torch.stack([image[:, y : y + size, x : x + size] * gain for image, (y, x), gain in rows]).clamp_(0, 255)


def _augment(images: Tensor, seed: int = 3) -> Tensor:
    return Classification().augment(images, [0] * len(images), torch.Generator().manual_seed(seed))[0]


def test_every_frame_is_shifted_and_lit_as_if_it_were_alone() -> None:
    images = torch.randint(0, 256, (9, 3, 25, 25), dtype=torch.uint8)
    wanted = _one_by_one(images, torch.Generator().manual_seed(3)).to(torch.uint8)
    assert torch.equal(_augment(images), wanted) and not torch.equal(wanted, images)
