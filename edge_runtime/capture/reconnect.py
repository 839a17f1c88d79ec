"""When a camera counts as lost and when it is retried: a pure function from (link, event, now) to the next link.

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
    min_jitter: float = 0.5
    """Cameras that failed together (a switch, a recorder) are retried between this share of the pause and all of it."""


PAUSES = RetryPauses()


@dataclass(frozen=True, slots=True)
class LinkRules:
    """`timeout_s` is how long a frame may take; a link is retried `forever` or ends when it is lost."""

    timeout_s: float
    forever: bool


@dataclass(frozen=True, slots=True)
class LinkState:
    """What is known of one camera; times are seconds of one monotonic clock.

    `away_since` is when its frames stopped (at first: when it was started), None while they come. `retry_at` is set
    while it waits for the next attempt, `problem` while it is away or after it ended in error. `reconnects` counts how
    often frames came again.
    """

    phase: CameraPhase
    away_since: float | None
    retry_at: float | None = None
    reconnects: int = 0
    has_streamed: bool = False
    problem: str | None = None

    @property
    def state(self) -> CameraPhase:
        """The state shown to operators: a camera that is retried is away until a frame comes."""
        is_retrying = self.phase is CameraPhase.CONNECTING and self.problem is not None
        return CameraPhase.AWAY if is_retrying else self.phase


@dataclass(frozen=True, slots=True)
class FrameCame:
    """A frame was decoded."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The connection failed, for a reason without secrets."""

    reason: str


@dataclass(frozen=True, slots=True)
class SourceEnded:
    """The source has no more frames."""


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Nothing came; the decoder has worked on the next frame since `busy_since` (None: it is idle)."""

    busy_since: float | None = None


@dataclass(frozen=True, slots=True)
class Stopped:
    """The box stops."""


LinkEvent = FrameCame | Lost | SourceEnded | TimePassed | Stopped


def initial_link(now: float) -> LinkState:
    """The link of a camera whose first connection is made now."""
    return LinkState(CameraPhase.CONNECTING, now)


def next_link(link: LinkState, event: LinkEvent, now: float, rules: LinkRules, jitter: float = 1.0) -> LinkState:
    """The link after an event; `jitter` is a random number from 0 to 1.

    The caller opens a connection where the phase becomes CONNECTING, and closes it where it becomes AWAY or ENDED.
    """
    if link.phase is CameraPhase.ENDED:
        return link
    if isinstance(event, Stopped):
        return replace(link, phase=CameraPhase.ENDED, retry_at=None)
    if link.phase is CameraPhase.AWAY:
        is_due = isinstance(event, TimePassed) and link.retry_at is not None and now >= link.retry_at
        return replace(link, phase=CameraPhase.CONNECTING, retry_at=None) if is_due else link
    match event:
        case FrameCame():
            if link.phase is CameraPhase.STREAMING:
                return link
            return LinkState(
                CameraPhase.STREAMING, None, reconnects=link.reconnects + link.has_streamed, has_streamed=True
            )
        case TimePassed(busy_since):
            if busy_since is None or now - busy_since < rules.timeout_s:
                return link
            return _lose(link, f"no frame came for {rules.timeout_s:g} s", now, rules, jitter)
        case Lost(reason):
            return _lose(link, reason, now, rules, jitter)
        case SourceEnded():
            if link.phase is CameraPhase.STREAMING and not rules.forever:
                return replace(link, phase=CameraPhase.ENDED, away_since=now)
            return _lose(link, "it has no frame that can be decoded", now, rules, jitter)


def retry_pause_s(away_s: float, jitter: float) -> float:
    """Seconds until a camera that has been away for `away_s` is retried; `jitter` is from 0 to 1."""
    longest = PAUSES.max_s if away_s < PAUSES.long_away_s else PAUSES.max_long_away_s
    pause = min(longest, max(PAUSES.min_s, PAUSES.away_share * away_s))
    return pause * (PAUSES.min_jitter + (1 - PAUSES.min_jitter) * jitter)


def _lose(link: LinkState, reason: str, now: float, rules: LinkRules, jitter: float) -> LinkState:
    since = now if link.away_since is None else link.away_since
    if not rules.forever:
        return replace(link, phase=CameraPhase.ENDED, away_since=since, problem=reason)
    retry_at = now + retry_pause_s(now - since, jitter)
    return replace(link, phase=CameraPhase.AWAY, away_since=since, retry_at=retry_at, problem=reason)
