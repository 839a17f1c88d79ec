"""Messages and workers for tests of sinks, and waiting for what threads do."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gemel.edge_runtime.backoff import BackOff
from gemel.edge_runtime.sinks.base import BoxState, ResultMessage, SinkConfig, Switch
from gemel.edge_runtime.sinks.worker import Outbox, OutboxLimits, SinkWorker

SOON = BackOff(0.02, 0.1)
TIMEOUT_S = 30.0


def make_message(frame: int, image: bool = False, **keys: Any) -> ResultMessage:
    """A result of the query `gate` on the camera `left`."""
    record = {"run": "r", "query": "gate", "camera": "left", "frame": frame, "label": "a", "score": 0.5, **keys}
    return ResultMessage(record, np.full((48, 64, 3), frame % 256, np.uint8) if image else None)


@contextlib.contextmanager
def running_worker(
    config: SinkConfig,
    items: int = 1000,
    state: Callable[[], BoxState] = BoxState,
    switch: Switch | None = None,
) -> Iterator[SinkWorker]:
    """A running worker, which retries soon, of a box in this state."""
    worker = SinkWorker(config, Outbox(OutboxLimits(items), SOON), state, switch)
    worker.start()
    yield worker
    worker.close()
    worker.join(TIMEOUT_S)


def read_frames(path: Path) -> list[int]:
    """The frame numbers of a file of JSON lines."""
    return [json.loads(line)["frame"] for line in path.read_text().splitlines()]


def until(is_true: Callable[[], Any]) -> None:
    """Wait for another thread."""
    deadline = time.monotonic() + TIMEOUT_S
    while not is_true():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)
