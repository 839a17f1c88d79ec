"""Fleet files of small zoo models, and drawn demands, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import yaml

from gemel.fleet import Demands
from gemel.placement import BoxGroup

DEVICE = "jetson-nano"


def query(name: str, model: str = "resnet18", camera: str = "gate", **keys: Any) -> dict[str, Any]:
    """A query of a workload file."""
    return {
        "id": name, "camera": camera, "task": "classification", "classes": ["free", "taken"], "model": model,
        "input_size": 64, "fps": 2, **keys,
    }  # fmt: skip


def write_workload(path: Path, *queries: dict[str, Any], **keys: Any) -> Path:
    """A workload file of these queries, with cameras that are files beside it."""
    cameras = {one["camera"]: {"source": f"clips/{one['camera']}.mp4", "fps": 5} for one in queries}
    path.write_text(yaml.safe_dump({"name": path.stem, "cameras": cameras, "queries": list(queries), **keys}))
    return path


def write_fleet(path: Path, boxes: list[dict[str, Any]], *workloads: Path) -> Path:
    """A fleet file."""
    names = [workload.name for workload in workloads]
    path.write_text(yaml.safe_dump({"name": path.stem, "boxes": boxes, "workloads": names}))
    return path


def draw_demands(seed: int, queries: int, groups: int) -> tuple[Demands, list[BoxGroup]]:
    """Drawn queries that share pieces, and drawn boxes."""
    rng = np.random.default_rng(seed)
    counts = list[int]()
    while sum(counts) < queries:
        counts.append(min(queries - sum(counts), int(rng.integers(1, 3))))
    kinds = len(counts)
    demands = Demands(
        tuple(tuple(f"kind{kind}-{number}" for number in range(count)) for kind, count in enumerate(counts)),
        rng.integers(5, 30, kinds) << 20,
        rng.integers(1, 10, kinds) << 20,
        rng.integers(1, 6, kinds).astype(float),
        rng.integers(5, 40, 4) << 20,
        rng.random((kinds, 4)) < 0.5,
    )
    frame_s, allowed = rng.uniform(0.02, 0.2, kinds), np.ones(kinds, dtype=bool)
    return demands, [
        BoxGroup(int(rng.integers(1, 3)), float(rng.integers(1, 4)), int(rng.integers(90, 200)) << 20,
                 frame_s * (1 + index), allowed)
        for index in range(groups)
    ]  # fmt: skip
