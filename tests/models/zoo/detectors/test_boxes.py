"""Anchors, their decoding, and suppression, against torchvision's."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torchvision.models.detection._utils import BoxCoder
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.image_list import ImageList
from torchvision.ops import box_iou, nms

from gemel.models.zoo.detectors.box_ops import NOTHING, anchors_of, decode_boxes, rows_where, suppress

GENERATOR = AnchorGenerator(((32, 40), (64,)), ((0.5, 1.0, 2.0),) * 2)


def boxes_of(frames: int, count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    low = torch.rand(frames, count, 2, generator=generator) * 40
    return torch.cat([low, low + 1 + 20 * torch.rand(frames, count, 2, generator=generator)], dim=2)


def test_anchors_are_torchvisions():
    maps = [torch.zeros(1, 1, 12, 12), torch.zeros(1, 1, 5, 5)]
    theirs = GENERATOR(ImageList(torch.zeros(1, 1, 96, 96), [(96, 96)]), maps)[0]
    torch.testing.assert_close(anchors_of(GENERATOR, 96, [(12, 12), (5, 5)]), theirs)


def test_decode_boxes_inverts_encoding_and_bounds_deltas():
    coder = BoxCoder((10.0, 10.0, 5.0, 5.0))
    anchors, wanted = boxes_of(1, 20, 0)[0], boxes_of(1, 20, 1)[0]
    deltas = coder.encode_single(wanted, anchors)
    torch.testing.assert_close(decode_boxes(deltas.expand(3, -1, -1), anchors, coder.weights)[1], wanted)
    wild = torch.full_like(deltas, 1e4)
    torch.testing.assert_close(decode_boxes(wild, anchors, coder.weights), coder.decode_single(wild, anchors))


@given(st.integers(1, 40), st.integers(0, 10**6), st.floats(0.1, 0.9), st.floats(0, 1))
def test_suppress_equals_plain_suppression(count, seed, iou, absent):
    boxes = boxes_of(2, count, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    scores = torch.rand(2, count, generator=generator)
    scores = torch.where(torch.rand(2, count, generator=generator) < absent, NOTHING, scores)
    kept = suppress(boxes, scores, iou)
    for frame in range(2):
        real = (scores[frame] >= 0).nonzero().squeeze(1)
        expected = torch.full((count,), NOTHING)
        rows = real[nms(boxes[frame, real], scores[frame, real], iou)]
        expected[rows] = scores[frame, rows]
        assert torch.equal(kept[frame], expected)
        assert (box_iou(boxes[frame, rows], boxes[frame, rows]).fill_diagonal_(0) <= iou + 1e-6).all()


def test_suppress_on_meta_keeps_all():
    boxes, scores = torch.zeros(2, 7, 4, device="meta"), torch.zeros(2, 7, device="meta")
    assert suppress(boxes, scores, 0.5).shape == (2, 7)
    assert rows_where(scores.flatten() > 0).shape == (14,)
