"""When a camera counts as lost and when it is tried again: pure, from (link, event, now) to the next link.

A link that is to last for ever is tried again for ever, the sooner the shorter it is away; one that is not ends.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

SHORTEST_S, LONGEST_S = 0.5, 5.0
LONG_AWAY_S, LONGEST_THEN_S = 600.0, 30.0
AWAY_SHARE = 0.25
"""A camera is tried again after this share of the time that it has been away: back within 2 s after up to 8 s."""
MIN_JITTER = 0.5
"""Cameras that fell together (a switch, a recorder) are tried between this share of the pause and all of it."""


class CameraPhase(str, Enum):
    """What a camera is at."""

    __str__ = str.__str__

    CONNECTING = "connecting"
    STREAMING = "streaming"
    AWAY = "away"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class LinkState:
    """What is known of one camera; times are in seconds of one monotonic clock.

    `phase` is what is done, `state` what is told: a camera that is tried again is away until a frame came. `away_since`
    is when its frames stopped (at first: when it was begun), None while they come; `retry_at` stands while it waits
    for the next try, `fault` while it is away or after it ended in error. `reconnects` counts how often frames came
    again.
    """

    phase: CameraPhase
    away_since: float | None
    retry_at: float | None = None
    reconnects: int = 0
    has_streamed: bool = False
    fault: str | None = None

    @property
    def state(self) -> CameraPhase:
        """What an operator sees."""
        return CameraPhase.AWAY if self.phase is CameraPhase.CONNECTING and self.fault is not None else self.phase


@dataclass(frozen=True, slots=True)
class LinkRules:
    """`timeout_s` is how long a frame may take; a link is `forever` or ends when it is lost."""

    timeout_s: float
    forever: bool


@dataclass(frozen=True, slots=True)
class FrameCame:
    """A frame was decoded."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The connection failed, for a reason that may be shown."""

    reason: str


@dataclass(frozen=True, slots=True)
class SourceEnded:
    """The source has no more frames."""


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Nothing came; since `busy_since` the decoder is at the next frame (None: it waits, for its time or for us)."""

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

    Who carries it out opens a connection where the phase becomes CONNECTING, and drops it where the phase becomes AWAY
    or ENDED.
    """
    if link.phase is CameraPhase.ENDED:
        return link
    match event:
        case Stopped():
            return replace(link, phase=CameraPhase.ENDED, retry_at=None)
        case TimePassed(busy_since):
            return _waited(link, busy_since, now, rules, jitter)
        case _ if link.phase is CameraPhase.AWAY:
            return link
        case FrameCame():
            return _streaming(link)
        case Lost(reason):
            return _lost(link, reason, now, rules, jitter)
        case SourceEnded() if link.phase is CameraPhase.STREAMING and not rules.forever:
            return replace(link, phase=CameraPhase.ENDED, away_since=now)
        case SourceEnded():
            return _lost(link, "it has no frame that can be decoded", now, rules, jitter)


def pause_s(away_s: float, jitter: float) -> float:
    """Seconds until a camera that has been away for `away_s` is tried again; `jitter` is from 0 to 1."""
    longest = LONGEST_S if away_s < LONG_AWAY_S else LONGEST_THEN_S
    pause = min(longest, max(SHORTEST_S, AWAY_SHARE * away_s))
    return pause * (MIN_JITTER + (1 - MIN_JITTER) * jitter)


def _waited(link: LinkState, busy_since: float | None, now: float, rules: LinkRules, jitter: float) -> LinkState:
    if link.phase is CameraPhase.AWAY:
        due = link.retry_at is not None and now >= link.retry_at
        return replace(link, phase=CameraPhase.CONNECTING, retry_at=None) if due else link
    if busy_since is None or now - busy_since < rules.timeout_s:
        return link
    return _lost(link, f"no frame came for {rules.timeout_s:g} s", now, rules, jitter)


def _streaming(link: LinkState) -> LinkState:
    if link.phase is CameraPhase.STREAMING:
        return link
    again = link.reconnects + link.has_streamed
    return LinkState(CameraPhase.STREAMING, None, reconnects=again, has_streamed=True)


def _lost(link: LinkState, reason: str, now: float, rules: LinkRules, jitter: float) -> LinkState:
    since = now if link.away_since is None else link.away_since
    if not rules.forever:
        return replace(link, phase=CameraPhase.ENDED, away_since=since, fault=reason)
    retry_at = now + pause_s(now - since, jitter)
    return replace(link, phase=CameraPhase.AWAY, away_since=since, retry_at=retry_at, fault=reason)
