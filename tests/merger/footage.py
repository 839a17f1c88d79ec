"""Footage without labels for the tiny workloads: clips of pictures, each of which is a block."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import yaml

from gemel.models.workload import Workload, load_workload
from tests.merger.tiny import _frame

FRAMES, INTERVAL_MS = 2, 10_000
"""Of a clip of 20 s."""


def write_clips(folder: Path, clips: int, seed: int = 7, background: tuple[int, ...] = (60, 60, 60)) -> None:
    """So many clips of 20 s, each with squares on the left and on the right."""
    random = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    for clip in range(clips):
        for frame in range(FRAMES):
            picture = _frame(random, np.array(background), far=frame % 2 == 1)
            cv2.imwrite(str(folder / f"clip{clip:04d}__{INTERVAL_MS * frame:06d}.png"), picture)


def add_footage(workload: Workload, clips: int, seed: int = 7) -> Workload:
    """Give every query footage with the background of its own frames."""
    document = yaml.safe_load(workload.path.read_text())
    backgrounds = np.random.default_rng(0)
    for index, query in enumerate(document["queries"]):
        background = tuple(backgrounds.integers(0, 120, 3).tolist())
        folder = workload.path.parent / f"footage-{query['id']}"
        write_clips(folder, clips, seed + index, background)
        query["footage"] = folder.name
    workload.path.write_text(yaml.safe_dump(document))
    return load_workload(workload.path)
