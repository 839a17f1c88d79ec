"""Frames are resized as DESIGN.md says: bilinear and antialiased, by torchvision."""

import numpy as np
import pytest
import torch
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as F

from models.preprocess import Preprocess

SIZES = [(720, 1280, 224), (32, 24, 64), (1, 1, 16), (100, 64, 64), (37, 53, 97), (5, 1, 16), (64, 64, 64)]


@pytest.mark.parametrize(("height", "width", "side"), SIZES)
def test_a_frame_is_resized_as_torchvision_resizes_it(height, width, side):
    frame = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    image = torch.from_numpy(frame).permute(2, 0, 1)
    expected = F.resize(image, [side, side], interpolation=InterpolationMode.BILINEAR, antialias=True)
    assert torch.equal(Preprocess(side).resize(frame), expected)


def test_a_part_of_a_frame_is_resized_like_a_frame_of_its_own():
    frame = np.random.default_rng(0).integers(0, 256, (60, 80, 3), np.uint8)
    part = frame[10:50, 20:70]
    assert torch.equal(Preprocess(32).resize(part), Preprocess(32).resize(part.copy()))


def test_one_frame_becomes_a_batch_that_a_network_takes():
    frame = np.random.default_rng(0).integers(0, 256, (60, 80, 3), np.uint8)
    prepare = Preprocess(32)
    batch = prepare(frame)
    assert batch.shape == (1, 3, 32, 32) and batch.dtype == torch.float32
    assert torch.equal(batch, prepare.normalise(torch.stack([prepare.resize(frame)])))
