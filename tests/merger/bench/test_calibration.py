"""Norms are measured again on even chunks of frames, however many there are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from merger.bench.workbench import CALIBRATION_BATCH, Workbench


class _Frames:
    """So many frames of noise, and the chunks in which they were asked for."""

    def __init__(self, count: int) -> None:
        self.all, self.asked = torch.randn(count, 3, 4, 4, generator=torch.Generator().manual_seed(count)), []

    def __len__(self) -> int:
        return len(self.all)

    def frames(self, indices: list[int], device: Any) -> Tensor:
        self.asked.append(len(indices))
        return self.all[indices]


def _model() -> nn.Sequential:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(3)).eval()


@pytest.mark.parametrize("count", [2, 31, 32, 33, 65, 97, 256])
def test_every_frame_counts_alike_and_none_is_left_over(bench: Workbench, count: int) -> None:
    data = _Frames(count)
    bench.train = {**bench.train, "q0": data}  # type: ignore[dict-item]
    model = _model()
    bench.calibrate("q0", model)
    assert sum(data.asked) == count and max(data.asked) - min(data.asked) <= 1 and max(data.asked) <= CALIBRATION_BATCH
    torch.testing.assert_close(model[1].running_mean, data.all.mean((0, 2, 3)), atol=1e-6, rtol=1e-5)


def test_one_frame_tells_of_no_spread(bench: Workbench) -> None:
    bench.train = {**bench.train, "q0": _Frames(1)}  # type: ignore[dict-item]
    model = _model()
    bench.calibrate("q0", model)
    assert torch.equal(model.state_dict()["1.running_var"], torch.ones(3))
