"""Which answers become samples, and which samples make way: decisions, with no clock or disk of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

RETRY_S = 1.0
"""A sample for which there is no room now is tried again so much later."""


class Choice(Enum):
    """What becomes of an answer: it is no sample, it is one, or it should be and there is no room."""

    PASS = "pass"
    TAKE = "take"
    NO_ROOM = "no room"


@dataclass(frozen=True, slots=True)
class Sampling:
    """One sample of each query every `every_s` seconds; `due_at` says from when on the next one of a query is due.

    A query that is not in it was never sampled: its first answer is. Seconds are of any clock that does not go back.
    """

    every_s: float
    due_at: Mapping[str, float] = field(default_factory=dict)


def answered(state: Sampling, query: str, has_room: bool, now: float) -> tuple[Sampling, Choice]:
    """What follows from an answer of a query at this time, and what becomes of it."""
    if now < state.due_at.get(query, now):
        return state, Choice.PASS
    wait_s = state.every_s if has_room else min(RETRY_S, state.every_s)
    after = replace(state, due_at={**state.due_at, query: now + wait_s})
    return after, Choice.TAKE if has_room else Choice.NO_ROOM


def making_way(sizes: Sequence[int], coming: int, most: int) -> int | None:
    """How many samples, the oldest first, go before one of `coming` bytes, so that all take `most` bytes at most.

    `sizes` are the bytes of those that are there, the oldest first. None: it is too large whatever goes.
    """
    if coming > most:
        return None
    total, gone = sum(sizes) + coming, 0
    while total > most:
        total -= sizes[gone]
        gone += 1
    return gone
