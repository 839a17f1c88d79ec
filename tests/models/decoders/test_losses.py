"""The losses of imported models, on plain tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torchvision.ops import box_iou

from gemel.models.decoders.last_activations import Activation
from gemel.models.decoders.losses import (
    as_rows,
    dense_loss,
    distill_outputs,
    matched_loss,
    rows_by_level,
)
from gemel.models.detector import BoxTarget

NONE = torch.full((1,), Activation.NONE)
SIGMOID = torch.full((1,), Activation.SIGMOID)
SOFTMAX = torch.full((1,), Activation.SOFTMAX)


def distance(mine: Tensor, theirs: Tensor, kind: Tensor = NONE, scores: Tensor | None = None) -> float:
    return float(distill_outputs([mine], [theirs], [kind], [scores]))


@pytest.mark.parametrize("shape", [(4, 3), (4, 20, 6), (4, 6, 20), (2, 5, 4, 4), (2, 3, 4, 4, 6)])
def test_distillation_of_equal_outputs_is_zero_and_positive_otherwise(shape):
    outputs = torch.randn(shape)
    assert distance(outputs, outputs) == 0
    assert distance(outputs + torch.randn(shape), outputs) > 0


@given(st.floats(0.01, 1000), st.floats(-1000, 1000))
@settings(deadline=None, max_examples=20)
def test_distillation_does_not_depend_on_scale_and_offset_of_a_channel(scale: float, offset: float):
    draws = torch.Generator().manual_seed(0)
    theirs = torch.randn(4, 50, 3, generator=draws, dtype=torch.float64)
    mine = theirs + 0.1 * torch.randn(4, 50, 3, generator=draws, dtype=torch.float64)
    factor = torch.tensor([scale, scale, scale])
    changed = distance(mine * factor + offset, theirs * factor + offset)
    assert changed == pytest.approx(distance(mine, theirs), rel=1e-2)


def test_distillation_compares_probabilities_as_log_odds():
    theirs = torch.randn(4, 50, 3)
    mine = theirs + 0.3 * torch.randn(4, 50, 3)
    even = torch.ones(4, 50)
    assert distance(mine.sigmoid(), theirs.sigmoid(), SIGMOID, even) == pytest.approx(distance(mine, theirs), rel=1e-2)


def test_distillation_of_softmax_ignores_what_softmax_ignores():
    theirs = torch.randn(4, 50, 3)
    assert distance((theirs + 5).softmax(2), theirs.softmax(2), SOFTMAX) == pytest.approx(0, abs=1e-4)


def test_background_rows_do_not_drown_the_one_with_an_object():
    theirs, scores = torch.randn(1, 8400, 6), torch.full((1, 8400), 1e-4)
    scores[0, 7] = 0.9
    at_object, elsewhere = theirs.clone(), theirs.clone()
    at_object[0, 7] += 1
    elsewhere[0, 8] += 1
    assert distance(at_object, theirs, NONE, scores) > 20 * distance(elsewhere, theirs, NONE, scores)


def test_rows_count_by_their_own_probabilities_where_no_scores_are_given():
    theirs = torch.full((1, 100, 4), 1e-3)
    theirs[0, 3, 2] = 0.9
    at_object, elsewhere = theirs.clone(), theirs.clone()
    at_object[0, 3, 1], elsewhere[0, 4, 1] = 1e-2, 1e-2
    assert distance(at_object, theirs, SIGMOID) > 10 * distance(elsewhere, theirs, SIGMOID)


def test_whole_numbers_are_left_out_of_distillation():
    whole = torch.tensor([[1, 2]])
    assert float(distill_outputs([whole], [whole], [NONE])) == 0


def test_gradients_are_finite_at_probabilities_of_zero_and_one():
    mine = torch.tensor([[[0.0, 1.0, 0.5]]], requires_grad=True)
    distill_outputs([mine], [torch.tensor([[[1.0, 0.0, 0.5]]])], [SIGMOID]).backward()
    assert mine.grad is not None and bool(mine.grad.isfinite().all())


@pytest.mark.parametrize(
    ("shape", "count", "rows"),
    [((2, 5), None, 1), ((2, 9, 6), 9, 9), ((2, 6, 9), 9, 9), ((2, 9, 9), 9, 9), ((2, 6, 3, 4), 12, 12),
     ((2, 3, 4, 6), 12, 12), ((2, 3, 4, 4, 6), None, 48)],
)  # fmt: skip
def test_outputs_become_rows(shape, count, rows):
    assert as_rows(torch.zeros(shape), count).shape[:2] == (2, rows)


def test_scores_are_dealt_to_levels_from_fine_to_coarse():
    scores = torch.arange(21.0).expand(2, 21)
    parts = rows_by_level(scores, [torch.zeros(2, count, 5) for count in (16, 4, 1, 16, 4, 1)])
    assert [part is not None and part[0].tolist() for part in parts[:3]] == [list(range(16)), [16, 17, 18, 19], [20]]
    assert [part is not None and part.shape for part in rows_by_level(scores, [torch.zeros(2, 6, 21)])] == [(2, 21)]
    assert rows_by_level(scores, [torch.zeros(2, 7, 5), torch.zeros(2, 3, 5)]) == [None, None]


class TinyDense(nn.Module):
    """Boxes around the cells of an 8 x 8 grid, or anywhere for `queries`, and scores of two classes."""

    def __init__(self, rows: int, frames: int) -> None:
        super().__init__()
        y, x = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")
        self.cells = torch.stack([x, y], dim=-1).flatten(0, 1)[:rows] + 0.5
        self.boxes = nn.Parameter(torch.zeros(frames, rows, 4))
        self.scores = nn.Parameter(torch.full((frames, rows, 2), -3.0))

    def forward(self) -> tuple[Tensor, Tensor]:
        centre = (self.cells + self.boxes[..., :2]) / 8
        half = self.boxes[..., 2:].exp() / 16
        return torch.cat([centre - half, centre + half], dim=-1), self.scores.sigmoid()


TARGETS = [
    BoxTarget(torch.tensor([[0.1, 0.1, 0.4, 0.5], [0.55, 0.5, 0.95, 0.9]]), torch.tensor([0, 1])),
    BoxTarget(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64)),
]


@pytest.mark.parametrize("loss", [dense_loss, matched_loss])
def test_training_finds_every_object_and_nothing_where_there_is_none(loss):
    model = TinyDense(64, 2)
    optimiser = torch.optim.Adam(model.parameters(), 0.05)
    for _ in range(300):
        optimiser.zero_grad()
        loss(*model(), TARGETS).backward()
        optimiser.step()
    boxes, scores = (each.detach() for each in model())
    for box, label in zip(*TARGETS[0], strict=True):
        best = scores[0, :, label].argmax()
        assert scores[0, best, label] > 0.6
        assert box_iou(boxes[0, best][None], box[None]) > 0.7
    assert scores[1].max() < 0.2
    confident = (scores[0] > 0.5).sum()
    assert confident == 2 if loss is matched_loss else confident >= 2


@pytest.mark.parametrize("loss", [dense_loss, matched_loss])
def test_more_objects_than_rows_still_give_a_finite_loss(loss):
    model, many = TinyDense(3, 1), 6
    corners = torch.rand(many, 2) * 0.5
    target = BoxTarget(torch.cat([corners, corners + 0.2], dim=1), torch.zeros(many, dtype=torch.int64))
    found = loss(*model(), [target])
    found.backward()
    assert model.boxes.grad is not None
    assert bool(found.isfinite()) and bool(model.boxes.grad.isfinite().all())
