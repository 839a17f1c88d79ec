"""Workloads of one query, for cases that need no other."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.hostile.samples import CLASSIFIED, DETECTED, YOLO

A, B, D = (dict(query) for query in (*CLASSIFIED, *DETECTED))
Y: dict[str, Any] = {"id": "y", **YOLO, "weights": "yolo.weights", "data": "data/d"}
NAME = "one.yaml"


def ask(folder: Path, query: Mapping[str, Any], camera: Mapping[str, Any] | None = None, **changes: Any) -> str:
    """The name of a workload in this folder that asks this query alone, so changed; None leaves a key out."""
    asked = {**query, "camera": "gate", "accuracy_target": 0.1, "sla_ms": 10_000, **changes}
    asked = {key: value for key, value in asked.items() if value is not None}
    cameras = {"gate": {"source": "gate.mp4", "fps": 5, **(camera or {})}}
    (folder / NAME).write_text(json.dumps({"name": "one", "cameras": cameras, "queries": [asked]}), encoding="utf-8")
    return NAME
