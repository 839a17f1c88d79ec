"""Parcels and couriers for tests of sinks, and waiting for what threads do."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from edge_runtime.backoff import BackOff
from edge_runtime.sinks.base import ResultMessage, SinkConfig
from edge_runtime.sinks.worker import Outbox, OutboxLimits, SinkWorker

SOON = BackOff(0.02, 0.1)
TIMEOUT_S = 30.0


def parcel(frame: int, image: bool = False, **keys: Any) -> ResultMessage:
    """A result of the query `gate` on the camera `left`."""
    record = {"run": "r", "query": "gate", "camera": "left", "frame": frame, "label": "a", "score": 0.5, **keys}
    return ResultMessage(record, np.full((48, 64, 3), frame % 256, np.uint8) if image else None)


@contextlib.contextmanager
def courier(config: SinkConfig, items: int = 1000) -> Iterator[SinkWorker]:
    """A courier at work, which tries again soon."""
    made = SinkWorker(config, Outbox(OutboxLimits(items), SOON))
    made.start()
    yield made
    made.close()
    made.join(TIMEOUT_S)


def until(true: Callable[[], Any]) -> None:
    """Wait for what another thread does."""
    ends = time.monotonic() + TIMEOUT_S
    while not true():
        assert time.monotonic() < ends, "it never happened"
        time.sleep(0.005)
