"""Fleets and needs for tests: files of small zoo models, and made-up numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import yaml

from gemel.placing.needs import Needs, Piece, Sort
from gemel.placing.rooms import Room

DEVICE = "jetson-nano"


def query(name: str, model: str = "resnet18", camera: str = "gate", **keys: Any) -> dict[str, Any]:
    """A query of a workload file."""
    return {
        "id": name, "camera": camera, "task": "classification", "classes": ["free", "taken"], "model": model,
        "input_size": 64, "fps": 2, **keys,
    }  # fmt: skip


def write_workload(path: Path, *queries: dict[str, Any], **keys: Any) -> Path:
    """A workload file of these queries, whose cameras are files beside it."""
    cameras = {one["camera"]: {"source": f"clips/{one['camera']}.mp4", "fps": 5} for one in queries}
    path.write_text(yaml.safe_dump({"name": path.stem, "cameras": cameras, "queries": list(queries), **keys}))
    return path


def write_fleet(path: Path, boxes: list[dict[str, Any]], *workloads: Path) -> Path:
    """A fleet file."""
    names = [workload.name for workload in workloads]
    path.write_text(yaml.safe_dump({"name": path.stem, "boxes": boxes, "workloads": names}))
    return path


def made_up(seed: int, queries: int, rooms: int) -> tuple[Needs, list[Room]]:
    """Needs of queries that share pieces, and rooms, both drawn."""
    rng = np.random.default_rng(seed)
    sorts, left = list[Sort](), queries
    while left:
        count = min(left, int(rng.integers(1, 3)))
        names = tuple(f"s{len(sorts)}-{number}" for number in range(count))
        sorts.append(Sort(
            names, int(rng.integers(5, 30)) << 20, int(rng.integers(1, 10)) << 20, float(rng.integers(1, 6)),
            {DEVICE: float(rng.uniform(0.02, 0.2))}, (True,) * rooms,
        ))  # fmt: skip
        left -= count
    pieces = tuple(
        Piece(int(rng.integers(5, 40)) << 20, frozenset(np.flatnonzero(rng.random(len(sorts)) < 0.5).tolist()))
        for _ in range(4)
    )
    needs = Needs(tuple(sorts), tuple(piece for piece in pieces if piece.sorts))
    seconds = needs.seconds(DEVICE)
    return needs, [
        Room(kind, int(rng.integers(1, 3)), float(rng.integers(1, 4)), int(rng.integers(90, 200)) << 20,
             seconds * (1 + kind), np.array([sort.reach[kind] for sort in needs.sorts]))
        for kind in range(rooms)
    ]  # fmt: skip
