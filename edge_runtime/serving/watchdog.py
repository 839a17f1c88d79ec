"""The watchdog: whether a step of the inference hangs.

Pure: what is being done and the time are passed in. A process that was stopped or a machine that slept is not taken
for a step that hangs: of the time between two looks only so much counts as they should be apart.
"""

from __future__ import annotations

from dataclasses import dataclass

MIN_S = 6.0
"""No step hangs that has not lasted so long."""
TIMES = 10.0
"""A step hangs that lasts so many times as long as it is believed to."""
POLL_INTERVAL_S = 0.2
"""How long it is from one look to the next, as a rule."""
MAX_GAP_S = 5 * POLL_INTERVAL_S


@dataclass(frozen=True, slots=True, eq=False)
class Doing:
    """One step, known by its identity: what it is, in words, and how many seconds it may last."""

    what: str
    most_s: float

    @classmethod
    def of(cls, what: str, believed_s: float) -> Doing:
        """A step that is believed to take so long."""
        return cls(what, max(MIN_S, TIMES * believed_s))


class Watchdog:
    """Looks at what is being done, again and again."""

    def __init__(self) -> None:
        self._doing: Doing | None = None
        self._looked_at = 0.0
        self._lasts_s = 0.0

    def looks(self, doing: Doing | None, now: float) -> str | None:
        """What hangs, in words; None while all is well."""
        if doing is not self._doing:
            self._doing, self._lasts_s = doing, 0.0
        else:
            self._lasts_s += min(MAX_GAP_S, now - self._looked_at)
        self._looked_at = now
        if doing is None or self._lasts_s <= doing.most_s:
            return None
        return f"{doing.what} has not ended for {self._lasts_s:.1f} s"
