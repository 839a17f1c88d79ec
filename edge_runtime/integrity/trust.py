"""What is believed of a bundle's bytes while it is served.

Pure: what the file looks like and what was found by hashing are passed in. Nothing is believed of a file that looks
otherwise than when it was hashed, until it has been hashed again and stood still meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from models.bundle.format import Stamp

STILL_S = 0.5
"""A file that was changed is hashed again once it has stood still so long."""


@dataclass(frozen=True, slots=True)
class Trust:
    """The file as it looked when it was `proven` (None while it is in doubt), and the tensors that are `bad` in it.

    `seen` is how it looks now, since `since`.
    """

    proven: Stamp | None
    bad: frozenset[str] = frozenset()
    seen: Stamp | None = None
    since: float = 0.0

    @property
    def doubted(self) -> bool:
        """Whether nothing in the file is proven."""
        return self.proven is None

    def lacks(self, name: str) -> bool:
        """Whether this tensor must not be loaded."""
        return self.proven is None or name in self.bad


WELL = Trust(Stamp(0, 0, 0))
"""All that there is can be loaded."""


def looked(trust: Trust, stamp: Stamp, now: float) -> Trust:
    """The file looks so now: where that is not as it was proven, nothing in it is any more."""
    if stamp == (trust.seen or trust.proven):
        return trust
    return replace(trust, proven=None, seen=stamp, since=now)


def is_due(trust: Trust, now: float) -> bool:
    """Whether a file in doubt is to be hashed again now."""
    return trust.doubted and now - trust.since >= STILL_S


def hashed(trust: Trust, before: Stamp, after: Stamp, bad: Collection[str]) -> Trust:
    """Every tensor was hashed, these did not match their names, and the file looked so before and after.

    What was read while the file changed says nothing.
    """
    if before != after or after != (trust.seen or trust.proven):
        return trust
    return Trust(after, frozenset(bad), after, trust.since)


def found_bad(trust: Trust, stamp: Stamp, name: str) -> Trust:
    """A tensor did not match its name while the file looked as proven: a disk can change bytes without a word."""
    return replace(trust, bad=trust.bad | {name}) if trust.proven == stamp else trust
