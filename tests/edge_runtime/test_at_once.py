"""Questions asked all at the same time: each has its own patience, and one that hangs or raises is nobody else's."""

from __future__ import annotations

import threading
import time

from edge_runtime.capture.sources import at_once


def test_one_that_hangs_or_raises_holds_up_no_other() -> None:
    both, never = threading.Barrier(2, timeout=30), threading.Event()

    def together() -> str:
        both.wait()
        return "here"

    started = time.monotonic()
    questions = [(never.wait, 0.2), (together, 30.0), (lambda: 1 // 0, 30.0), (together, 30.0)]
    assert at_once(questions, "nobody") == ["nobody", "here", "nobody", "here"]
    assert time.monotonic() - started < 25
    never.set()
