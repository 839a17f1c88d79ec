"""Single convolutions with weights channels last and in oneDNN's blocked order: from which size on blocks pay."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch.nn import functional as F

from edge_runtime.memory.onednn import Convolution, blocked, convolutions_of, convolve
from models import zoo

MODELS = {
    "resnet18": 224,
    "resnet50": 224,
    "efficientnet_b0": 224,
    "mobilenet_v3_small": 224,
    "squeezenet1_1": 224,
    "densenet121": 64,
    "mobilenet_v2": 64,
}
SIZES = (64, 256, 512, 1024, 2048)
"""Upper bounds of the groups that are summed up, KiB of a weight; what is larger is a group of its own."""
CALLS = 3
"""Runs between two looks at the clock."""


def convolutions(rounds: int) -> list[dict[str, Any]]:
    """A row per kernel and size of the weight: milliseconds of all together, one frame each, either way."""
    groups: dict[tuple[bool, int], list[tuple[float, float]]] = defaultdict(list)
    for model, size in MODELS.items():
        network = zoo.build(model, ("car", "bus"), {}, size, device="meta").eval()
        for convolution in sorted(set(convolutions_of(network, size).values())):
            timed = _timed(convolution, rounds)
            if timed is not None:
                kib = 4 * math.prod(convolution.shape) / 1024
                group = next((index for index, most in enumerate(SIZES) if kib < most), len(SIZES))
                groups[math.prod(convolution.shape[2:]) == 1, group].append(timed)
    rows = []
    for (point, group), times in sorted(groups.items(), reverse=True):
        last, own = (sum(times) / 1000 for times in zip(*times, strict=True))
        bounds = f"< {SIZES[group]}" if group < len(SIZES) else f">= {SIZES[-1]}"
        rows.append(
            {
                "kernel": "1x1" if point else "larger",
                "KiB": bounds,
                "convolutions": len(times),
                "channels last ms": round(last, 2),
                "blocked ms": round(own, 2),
                "ratio": round(own / last, 2),
                "faster blocked": sum(mine < other for other, mine in times),
            }
        )
    return rows


@torch.inference_mode()
def _timed(convolution: Convolution, rounds: int) -> tuple[float, float] | None:
    """Microseconds of the processor's time channels last and blocked, medians in turns; None for what has no blocks."""
    layout = blocked(convolution, least_bytes=0)
    if layout is None:
        return None
    shape, stride, padding, dilation, groups, size = convolution
    weight = torch.randn(shape)
    last = weight.contiguous(memory_format=torch.channels_last)
    whole = torch.zeros(layout.nbytes // weight.itemsize)
    whole[: weight.numel()] = weight.reshape(-1)
    layout.arrange(whole, 0)
    own = layout.view(whole, 0)
    frames = torch.randn(1, shape[1] * groups, *size).contiguous(memory_format=torch.channels_last)
    runs: tuple[Callable[[], object], ...] = (
        lambda: F.conv2d(frames, last, None, stride, padding, dilation, groups),
        lambda: convolve(own, None, frames, stride, padding, dilation, groups),
    )
    taken: tuple[list[float], ...] = ([], [])
    for _ in range(rounds + 2):
        for run, times in zip(runs, taken, strict=True):
            began = time.process_time()
            for _ in range(CALLS):
                run()
            times.append(1e6 * (time.process_time() - began) / CALLS)
    return median(taken[0][2:]), median(taken[1][2:])
