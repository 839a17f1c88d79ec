"""A merge that is interrupted between two of its trainings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import pytest


def stopping(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, tried: Sequence[Any], after: int
) -> Callable[[], None]:
    """Let a module's `train_private` be interrupted once so many more were `tried`; returns what lets it go on."""
    calls, train = len(tried), module.train_private

    def interrupted(*args: Any) -> dict[str, Any]:
        if len(tried) == calls + after:
            raise KeyboardInterrupt
        return train(*args)

    monkeypatch.setattr(module, "train_private", interrupted)
    return partial(monkeypatch.setattr, module, "train_private", train)
