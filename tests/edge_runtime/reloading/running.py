"""A box that runs in this process while a test changes what it serves."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from torch import nn

from edge_runtime.daemon import prepare
from edge_runtime.service import Service, StopSignals
from models.bundle import BundleQuery, Made, write_bundle
from tests.edge_runtime.tiny import net

TIMEOUT_S = 60.0


class Running:
    """Serves a config until the context ends; `summary` is the box's last word."""

    def __init__(self, config: Path) -> None:
        self.config = config
        self.summary: dict[str, Any] = {}

    def __enter__(self) -> Running:
        box, refit = prepare(self.config)
        self._asked = StopSignals(threading.Event())
        self.serving = Service(box, self._asked, refit)
        self.serving.start(float("inf"))
        self._thread = threading.Thread(target=self._oversee)
        self._thread.start()
        return self

    def _oversee(self) -> None:
        try:
            self.serving.oversee()
        finally:
            self.summary = self.serving.end()

    def __exit__(self, *_: object) -> None:
        self._asked.stopping.set()
        self._thread.join()

    def reload(self) -> str | None:
        """Ask for a reload and wait for its outcome: None, or why it was refused."""
        return self.serving._reloads.request().result(TIMEOUT_S)

    def records(self, name: str = "results.jsonl") -> list[dict[str, Any]]:
        """What a sink has by now."""
        path = self.config.parent / name
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]

    def until(self, what: Callable[[], Any]) -> Any:
        """Wait until this is so; the value it then has."""
        waits = threading.Event()
        for _ in range(int(TIMEOUT_S / 0.02)):
            if found := what():
                return found
            waits.wait(0.02)
        raise AssertionError(f"it never came to that: {self.serving.summary()}")

    def more(self, query_id: str, count: int = 2) -> list[dict[str, Any]]:
        """So many further results of a query."""
        before = len(self.of(query_id))
        return self.until(lambda: (found := self.of(query_id)[before:])[count - 1 :] and found)

    def of(self, query_id: str) -> list[dict[str, Any]]:
        """The results of a query so far."""
        return [record for record in self.records() if record["query"] == query_id]


def write(path: Path, models: Mapping[str, nn.Module], *queries: BundleQuery) -> Path:
    """A bundle that takes the place of whatever is there, by rename."""
    fresh = path.with_suffix(".new")
    write_bundle(fresh, models, list(queries), Made("tiny", "wide", 0))
    os.replace(fresh, path)
    return path


def wider(seed: int, width: int = 20) -> nn.Module:
    """Another architecture: the net with more channels."""
    torch.manual_seed(seed)
    return net(3, width=width).eval()


def frames_of(clip: Path) -> list[np.ndarray]:
    """All frames of a video, RGB."""
    capture, frames = cv2.VideoCapture(str(clip)), []
    while (read := capture.read())[0]:
        frames.append(cv2.cvtColor(read[1], cv2.COLOR_BGR2RGB))
    return frames
