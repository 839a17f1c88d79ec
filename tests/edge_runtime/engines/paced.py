"""Engines of known speed, to be registered by tests: torch made slow, others quick once they were prepared."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from edge_runtime.engines.base import FrameEngine, nothing
from edge_runtime.engines.cache import EngineCache
from edge_runtime.engines.eager.engine import TorchEngine
from edge_runtime.engines.registry import ENGINES
from edge_runtime.memory.layout import Order

PAUSE_S = 0.005
AFTER = "PACED_AFTER"
"""Names a file: nothing is prepared before there is something in it."""
FAULT = "PACED_FAULT"
"""Set, no engine can be prepared."""
TIMEOUT_S = 300.0

RUNS: Counter[str] = Counter()
"""Runs by engine in this process."""
HEARD: dict[str, Callable[[], object]] = {}
"""What an engine's runs call, by its name."""


class Slow(TorchEngine):
    """The engine that runs everything, slower than any processor makes it."""

    def forward(self, batch: Tensor) -> Any:
        until = time.thread_time() + PAUSE_S
        while time.thread_time() < until:
            pass
        return super().forward(batch)

    def run(self, frames: Any, uploaded: Callable[[], object] = nothing) -> Any:
        RUNS["torch"] += 1
        return super().run(frames, uploaded)


class Quick(TorchEngine):
    """Has to be prepared once; takes weights as they are stored, and so in another order than `Slow`."""

    name = "quick"
    orders = frozenset({Order.STORED})
    faulty = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.orders = type(self).orders

    def ready(self) -> bool:
        return EngineCache().find({"engine": self.name}, ".paced") is not None

    def prepare(self) -> None:
        EngineCache().fetch({"engine": self.name}, ".paced", self._make)

    def run(self, frames: Any, uploaded: Callable[[], object] = nothing) -> Any:
        if type(self).faulty:
            raise RuntimeError("not as quick as that")
        RUNS[self.name] += 1
        HEARD.get(self.name, lambda: None)()
        return super().run(frames, uploaded)

    def _make(self, path: Path) -> dict[str, Any]:
        if FAULT in os.environ:
            raise RuntimeError("no tools")
        until = time.monotonic() + TIMEOUT_S
        while AFTER in os.environ and not (Path(os.environ[AFTER]).is_file() and Path(os.environ[AFTER]).read_text()):
            assert time.monotonic() < until, "nothing was served while this was prepared"
            time.sleep(0.01)
        path.write_text("made")
        return {}


class Nimble(Quick):
    """As `Quick`, in whatever order the weights lie."""

    name = "nimble"
    orders = frozenset(Order)


class Greedy(Nimble):
    """As `Nimble`, in more memory than any box has."""

    name = "greedy"

    def workspace_of(self, count: int) -> int:
        return 2**50


def only(monkeypatch: pytest.MonkeyPatch, **engines: type[FrameEngine]) -> None:
    """Register these engines and no others."""
    for name in list(ENGINES):
        monkeypatch.delitem(ENGINES, name)
    for name, kind in engines.items():
        monkeypatch.setitem(ENGINES, name, (kind.__module__, kind.__qualname__))
    RUNS.clear()
