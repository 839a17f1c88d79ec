"""Questions that may take long, asked all at the same time."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

Answer = TypeVar("Answer")


def at_once(questions: Iterable[tuple[Callable[[], Answer], float]], otherwise: Answer) -> list[Answer]:
    """What each answers within its seconds, each asked in a thread of its own; `otherwise` where one has not by then.

    A question that hangs is left behind, and holds up nobody, the end of the process included. One that raises has not
    answered.
    """
    started = time.monotonic()
    asked = []
    for question, patience_s in questions:
        answers: list[Answer] = []
        thread = threading.Thread(target=_ask, args=(question, answers), name="asking", daemon=True)
        thread.start()
        asked.append((answers, thread, patience_s))
    found = []
    for answers, thread, patience_s in asked:
        thread.join(max(0.0, started + patience_s - time.monotonic()))
        found.append(answers[0] if answers else otherwise)
    return found


def _ask(question: Callable[[], Answer], answers: list[Answer]) -> None:
    with contextlib.suppress(Exception):
        answers.append(question())
