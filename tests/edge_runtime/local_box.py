"""A box that runs in this process while a test changes what it serves."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from torch import nn

from gemel.edge_runtime.life.daemon import prepare
from gemel.edge_runtime.life.service import Service, StopSignals
from gemel.models.bundle import BundleQuery, Made, write_bundle
from gemel.models.export.export_document import export_documents
from tests.edge_runtime.tiny import net

TIMEOUT_S = 60.0


class LocalBox:
    """Serves a config until the context ends; then `summary` is that of the box."""

    def __init__(self, config: Path) -> None:
        self.config = config
        self.summary: dict[str, Any] = {}

    def __enter__(self) -> LocalBox:
        box, build = prepare(self.config)
        self.signals = StopSignals(threading.Event())
        self.service = Service(box, self.signals, build)
        self.service.start(float("inf"))
        self._thread = threading.Thread(target=self._oversee)
        self._thread.start()
        return self

    def _oversee(self) -> None:
        try:
            self.service.oversee()
        finally:
            self.summary = self.service.end()

    def __exit__(self, *_: object) -> None:
        self.signals.stopping.set()
        self._thread.join()

    def reload(self) -> str | None:
        """Reload and wait for the result: None, or why it was refused."""
        return self.service._reloads.request().result(TIMEOUT_S).reason

    def records(self, query_id: str = "", name: str = "results.jsonl") -> list[dict[str, Any]]:
        """The results in a sink's file so far, of one query or of all."""
        path = self.config.parent / name
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        records = [json.loads(line) for line in lines]
        return [record for record in records if query_id in ("", record["query"])]

    def until(self, condition: Callable[[], Any]) -> Any:
        """Wait until this is true; its value then."""
        deadline = time.monotonic() + TIMEOUT_S
        while not (value := condition()):
            assert time.monotonic() < deadline, self.service.summary()
            time.sleep(0.02)
        return value

    def more(self, *query_ids: str, count: int = 2) -> list[dict[str, Any]]:
        """So many further results of each of these queries."""
        before = {query_id: len(self.records(query_id)) for query_id in query_ids}
        for query_id, known in before.items():
            self.until(lambda query_id=query_id, known=known: len(self.records(query_id)) >= known + count)
        return [record for query_id, known in before.items() for record in self.records(query_id)[known:]]


def replace_bundle(path: Path, models: Mapping[str, nn.Module], *queries: BundleQuery, documents: bool = False) -> Path:
    """Write a bundle over whatever is there, by rename; with its networks for `documents`."""
    fresh = path.with_suffix(".new")
    graphs = export_documents(models, queries) if documents else {}
    write_bundle(fresh, models, list(queries), Made("tiny", "none", 0), documents=graphs)
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
