"""What it costs to prepare a camera's frame in each way, over squeezing it as models of the zoo take it.

Usage: python -m benchmarks.engines.preparation [--rounds 20]

Ratios of processor time in the quickest round; all ways run in turn; `bare` is torchvision's resize and a normalisation
written out, without the product.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from torchvision.transforms.v2 import functional as F

from gemel.models.preprocess import IMAGENET_MEAN, IMAGENET_STD, Preprocess

FRAME = (1080, 1920)
SIDES = (224, 640)


def prepare_bare(frame: np.ndarray, side: int) -> torch.Tensor:
    """One frame squeezed to a square and normalised as for ImageNet."""
    image = F.resize(torch.from_numpy(frame).permute(2, 0, 1), [side, side], antialias=True)
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) * 255 for values in (IMAGENET_MEAN, IMAGENET_STD))
    return torch.stack([image]).to(torch.float32).sub_(mean).div_(std).contiguous(memory_format=torch.channels_last)


def ways(frame: np.ndarray, side: int) -> dict[str, Callable[[], object]]:
    """The ways of preparing a frame by name."""
    square, ninths = (side, side), (side * 9 // 16, side)
    asked = {
        "stretch": Preprocess(square),
        "stretch, bgr 0..255": Preprocess(square, scale=255, channels="bgr"),
        "letterbox": Preprocess(square, "letterbox"),
        "letterbox, 16:9": Preprocess(ninths, "letterbox"),
        "center-crop": Preprocess(square, "center-crop", 0.875),
    }
    found: dict[str, Callable[[], object]] = {"bare": lambda: prepare_bare(frame, side)}
    for name, one in asked.items():
        found[name] = lambda one=one: one(frame)
    return found


def main() -> None:
    """Print a table of milliseconds and ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    frame = np.random.default_rng(0).integers(0, 256, (*FRAME, 3), np.uint8)
    for side in SIDES:
        best: dict[str, float] = {}
        for _ in range(rounds):
            for name, run in ways(frame, side).items():
                start = time.process_time()
                run()
                best[name] = min(best.get(name, np.inf), time.process_time() - start)
        for name, seconds in best.items():
            print(f"{side:4} {name:20} {1000 * seconds:7.2f} ms  {seconds / best['bare']:5.2f}")


if __name__ == "__main__":
    main()
