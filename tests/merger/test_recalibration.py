"""BatchNorm recalibration on even chunks of frames."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gemel.merger.checkpoint import StepCache
from gemel.merger.config import MEASUREMENT
from gemel.merger.context import MergeContext, recalibrate
from gemel.merger.evaluate import evaluate_queries


class _Frames:
    """So many frames of noise, and the chunks in which they were read."""

    def __init__(self, count: int) -> None:
        self.all, self.batch_sizes = torch.randn(count, 3, 4, 4, generator=torch.Generator().manual_seed(count)), []

    def __len__(self) -> int:
        return len(self.all)

    def batch(self, indices: list[int], generator: torch.Generator) -> tuple[Tensor, None]:
        self.batch_sizes.append(len(indices))
        return self.all[indices], None

    def model_input(self, images: Tensor, device: Any) -> Tensor:
        return images


def _model() -> nn.Sequential:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(3)).eval()


@pytest.mark.parametrize("count", [2, 31, 32, 33, 65, 97, 256])
def test_recalibration_any_count_uses_every_frame_once(ctx: MergeContext, count: int) -> None:
    data = _Frames(count)
    ctx.train = {**ctx.train, "q0": data}  # type: ignore[dict-item]
    model = _model()
    recalibrate(ctx, "q0", model, MEASUREMENT.recalibration_frames)
    assert (
        sum(data.batch_sizes) == count
        and max(data.batch_sizes) - min(data.batch_sizes) <= 1
        and max(data.batch_sizes) <= MEASUREMENT.recalibration_batch
    )
    torch.testing.assert_close(model[1].running_mean, data.all.mean((0, 2, 3)), atol=1e-6, rtol=1e-5)


def test_recalibration_of_clips_in_order_keeps_their_variance(ctx: MergeContext) -> None:
    data = _Frames(256)
    data.all += torch.arange(256)[:, None, None, None] // 32  # eight clips, one after the other
    ctx.train = {**ctx.train, "q0": data}  # type: ignore[dict-item]
    model = _model()
    recalibrate(ctx, "q0", model, MEASUREMENT.recalibration_frames)
    spread = data.all.mean((2, 3)).var(0)
    torch.testing.assert_close(model[1].running_var, spread, atol=0, rtol=0.1)


def test_recalibration_of_one_frame_changes_nothing(ctx: MergeContext) -> None:
    ctx.train = {**ctx.train, "q0": _Frames(1)}  # type: ignore[dict-item]
    model = _model()
    recalibrate(ctx, "q0", model, MEASUREMENT.recalibration_frames)
    assert torch.equal(model.state_dict()["1.running_var"], torch.ones(3))


def test_evaluation_fits_norms_only_below_what_is_required(ctx: MergeContext, monkeypatch: pytest.MonkeyPatch) -> None:
    models, refitted = ctx.models(["q0", "q1"]), []
    for model in models.values():
        next(model.parameters()).data *= 1.01
    ratios = {query: ctx.required_ratio(query) - (0.01 if query == "q1" else 0.0) for query in models}
    assert max(ratios.values()) < 1.0
    monkeypatch.setattr(ctx, "ratio", lambda query, model: ratios[query])
    monkeypatch.setattr(ctx, "recalibrate", lambda query, *_: refitted.append(query))
    assert evaluate_queries(ctx, StepCache(), "evaluated", models, MEASUREMENT.recalibration_frames) == ratios
    assert refitted == ["q1"]
