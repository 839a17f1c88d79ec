"""When a camera counts as lost and when it is retried: a pure value whose methods give the next one.

A live or looping camera is retried for ever, the more often the shorter it has been away; any other ends.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum


class CameraPhase(str, Enum):
    """What a camera does."""

    __str__ = str.__str__

    CONNECTING = "connecting"
    STREAMING = "streaming"
    AWAY = "away"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class RetryPauses:
    """Pause before the next connection: a share of the time away, within bounds, times a random factor."""

    min_s: float = 0.5
    max_s: float = 5.0
    long_away_s: float = 600.0
    """After this time away pauses may last `max_long_away_s`."""
    max_long_away_s: float = 30.0
    away_share: float = 0.25
    """Back within 2 s after up to 8 s away."""
    permanent_s: float = 60.0
    """Where the cause cannot pass by itself. A camera that has streamed is retried as any other for so long first: it
    may be starting, or its server may wait for it."""
    min_jitter: float = 0.5
    """Cameras that failed together (a switch, a recorder) are retried between this share of the pause and all of it."""


PAUSES = RetryPauses()


@dataclass(frozen=True, slots=True)
class LinkState:
    """What is known of one camera; times are seconds of one monotonic clock.

    `away_since` is when its frames stopped (at first: when it was started), None while they come. `retry_at` is set
    while it waits for the next attempt, `problem` while it is away or after it ended in error, `permanent` where that
    cannot pass by itself. `reconnects` counts how often frames came again.
    """

    phase: CameraPhase
    away_since: float | None
    retry_at: float | None = None
    reconnects: int = 0
    has_streamed: bool = False
    problem: str | None = None
    permanent: bool = False

    @property
    def state(self) -> CameraPhase:
        """The state shown to operators: a camera that is retried is away until a frame comes."""
        is_retrying = self.phase is CameraPhase.CONNECTING and self.problem is not None
        return CameraPhase.AWAY if is_retrying else self.phase

    def stream(self) -> LinkState:
        """A frame came."""
        if self.phase is not CameraPhase.CONNECTING:
            return self
        return LinkState(CameraPhase.STREAMING, None, reconnects=self.reconnects + self.has_streamed, has_streamed=True)

    def lose(self, problem: str, now: float, forever: bool, jitter: float = 1.0, permanent: bool = False) -> LinkState:
        """The connection failed, for a reason without secrets; it is retried `forever`, or ends.

        `jitter` is a random number from 0 to 1. `permanent`: the reason cannot pass by itself, so retries are rare.
        """
        since = now if self.away_since is None else self.away_since
        if not forever:
            return replace(self, phase=CameraPhase.ENDED, away_since=since, problem=problem)
        permanent = permanent and not (self.has_streamed and now - since < PAUSES.permanent_s)
        retry_at = now + retry_pause_s(now - since, jitter, permanent)
        return replace(
            self, phase=CameraPhase.AWAY, away_since=since, retry_at=retry_at, problem=problem, permanent=permanent
        )

    def retry(self) -> LinkState:
        """A connection is made again."""
        return replace(self, phase=CameraPhase.CONNECTING, retry_at=None)

    def end(self) -> LinkState:
        """The source has ended, or the box stops."""
        return replace(self, phase=CameraPhase.ENDED, retry_at=None)


def retry_pause_s(away_s: float, jitter: float, permanent: bool = False) -> float:
    """Seconds until a camera that has been away for `away_s` is retried; `jitter` is from 0 to 1."""
    longest = PAUSES.max_s if away_s < PAUSES.long_away_s else PAUSES.max_long_away_s
    pause = PAUSES.permanent_s if permanent else min(longest, max(PAUSES.min_s, PAUSES.away_share * away_s))
    return pause * (PAUSES.min_jitter + (1 - PAUSES.min_jitter) * jitter)
