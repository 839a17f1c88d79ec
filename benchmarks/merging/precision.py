"""What a training step takes in bf16 and in fp32 on this processor, and which of them `--precision auto` takes.

Usage: python -m benchmarks.merging.precision [--rounds 5]

Processor time of a forward and backward pass of 16 frames on one thread, the least of the rounds; random weights.
"""

from __future__ import annotations

import argparse
import time

import torch
import torchvision
from torch import nn

from benchmarks.machine import machine
from benchmarks.real.tables import table
from gemel.merger.training.step_config import AUTO, BF16, FP32, autocast, choose_precision

FRAMES = 16
MODELS = (
    ("resnet18", 64), ("resnet18", 224), ("resnet50", 96), ("densenet121", 96), ("squeezenet1_1", 96), ("vgg11", 64),
    ("mobilenet_v2", 96), ("mobilenet_v2", 224), ("shufflenet_v2_x1_0", 96), ("regnet_y_400mf", 96),
)  # fmt: skip


def step_seconds(model: nn.Module, side: int, precision: str, rounds: int) -> float:
    """Processor time of a step on frames of this side."""
    frames = torch.randn(FRAMES, 3, side, side).contiguous(memory_format=torch.channels_last)
    taken = []
    for _ in range(rounds):
        began = time.process_time()
        with autocast(precision, frames.device):
            outputs = model(frames)
        outputs.float().square().mean().backward()
        taken.append(time.process_time() - began)
        model.zero_grad(set_to_none=True)
    return min(taken)


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args(arguments)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rows = []
    for name, side in MODELS:
        model = torchvision.models.get_model(name).train().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        fp32, bf16 = (step_seconds(model, side, precision, given.rounds) for precision in (FP32, BF16))
        chosen = choose_precision(AUTO, model)
        rows.append(
            (name, side, f"{1000 * fp32 / FRAMES:.1f}", f"{1000 * bf16 / FRAMES:.1f}", f"{bf16 / fp32:.2f}", chosen)
        )
    heads = ("model", "side", "fp32, ms a frame", "bf16, ms a frame", "bf16 / fp32", "auto")
    print(table(f"Training steps on {machine()['cpu']}", heads, rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
