"""Fleet files of small zoo models, and drawn demands, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import yaml

from gemel.fleet import Demands, Piece, QueryKind
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
    kinds, left = list[QueryKind](), queries
    while left:
        count = min(left, int(rng.integers(1, 3)))
        names = tuple(f"kind{len(kinds)}-{number}" for number in range(count))
        private, workspace = int(rng.integers(5, 30)) << 20, int(rng.integers(1, 10)) << 20
        frame_s = {DEVICE: float(rng.uniform(0.02, 0.2))}
        kinds.append(QueryKind(names, private, workspace, float(rng.integers(1, 6)), frame_s, (True,) * groups))
        left -= count
    shared = [np.flatnonzero(rng.random(len(kinds)) < 0.5).tolist() for _ in range(4)]
    pieces = tuple(Piece(int(rng.integers(5, 40)) << 20, frozenset(one)) for one in shared if one)
    demands = Demands(tuple(kinds), pieces)
    seconds, allowed = np.array([kind.frame_s[DEVICE] for kind in kinds]), np.ones(len(kinds), dtype=bool)
    return demands, [
        BoxGroup(int(rng.integers(1, 3)), float(rng.integers(1, 4)), int(rng.integers(90, 200)) << 20,
                 seconds * (1 + index), allowed)
        for index in range(groups)
    ]  # fmt: skip
