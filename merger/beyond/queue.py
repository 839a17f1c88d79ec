"""Which candidates past the ceiling are tried next, and how many at once: decisions alone, nothing is trained here.

Candidates stand in order of bytes saved per risk, those of weights that one query has for itself before all others:
with these the shared weights stand still, and nobody else need train. As many as possible are taken at once, half as
many after a refusal, and what is refused alone is dropped (factors are tried at their next rank first).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from merger.beyond.candidates import Candidate

MAX_RISK = 0.5
"""The risk of all steps of one try, but for a single one's."""
Ladder = tuple[Candidate, ...]
"""A candidate, and those to try instead, one after the other, once it is refused alone."""


@dataclass(frozen=True)
class Queue:
    """The ladders that are left, the best first, and how many of them a try may take at most."""

    ladders: tuple[Ladder, ...] = ()
    size: int = 0

    @classmethod
    def of(cls, ladders: Iterable[Ladder]) -> Queue:
        """These in order, to be tried all at once."""
        found = tuple(sorted(ladders, key=lambda ladder: worth(ladder[0])))
        return cls(found, len(found))

    def next(self) -> Ladder:
        """What is tried next, together: either all private or all shared, and no risk that nothing mends."""
        return together([ladder[0] for ladder in self.ladders[: self.size]])

    def after(self, tried: Ladder, accepted: bool) -> Queue:
        """What is left once `next` was tried."""
        rest, size, alone = self.ladders, self.size, tried[0].alone
        if accepted:
            rest, size = self.ladders[len(tried) :], 2 * len(tried)
        elif len(tried) > 1:
            size = (len(tried) + 1) // 2
        else:
            first, *others = self.ladders
            larger = first[1:]
            rest = (larger, *others) if larger else tuple(others)
        if rest and rest[0][0].alone != alone:
            size = len(rest)  # what was refused says nothing of weights that are shared
        return Queue(rest, size)

    def to_plain(self) -> dict[str, Any]:
        """Plain values, for a journal."""
        return {"ladders": [[one.to_plain() for one in ladder] for ladder in self.ladders], "size": self.size}

    @classmethod
    def from_plain(cls, value: Mapping[str, Any]) -> Queue:
        """Inverse of `to_plain`."""
        ladders = tuple(tuple(map(Candidate.from_plain, ladder)) for ladder in value["ladders"])
        return cls(ladders, value["size"])


def together(candidates: Sequence[Candidate]) -> Ladder:
    """The first of these that one try may take."""
    chunk = candidates[:1]
    for candidate in candidates[1:]:
        risk = sum(one.risk for one in (*chunk, candidate))
        if candidate.alone != chunk[0].alone or risk > MAX_RISK:
            break
        chunk = [*chunk, candidate]
    return tuple(chunk)


def worth(candidate: Candidate) -> tuple[bool, float]:
    """What comes first: weights that nobody else has, then most bytes saved per risk."""
    return not candidate.alone, -candidate.saved_bytes / candidate.risk
