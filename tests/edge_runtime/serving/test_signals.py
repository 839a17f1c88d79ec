"""Signals to a box: which of them are one request, and which is another."""

from __future__ import annotations

import signal
import threading

import pytest

from edge_runtime.service import SAME_SIGNAL_S, catch_signals


def test_signals_close_together_count_once() -> None:
    now = [100.0]
    with catch_signals(stopping := threading.Event(), lambda: now[0]) as asked:
        asked.is_serving = True
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert stopping.is_set() and asked.reasons == ["SIGTERM"]
        now[0] += 2 * SAME_SIGNAL_S
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert asked.reasons == ["SIGTERM", "SIGINT"]
