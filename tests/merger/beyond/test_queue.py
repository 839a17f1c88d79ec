"""Which candidates are tried next, and how many at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from merger.beyond.candidates import LOW_RANK, Candidate
from merger.beyond.queue import Queue, together


def _ladders(*ranks: int, query: str = "q0") -> tuple[tuple[Candidate, ...], ...]:
    """A ladder for each of so many layers, with so many ranks, the one that saves most first."""
    return tuple(
        tuple(
            Candidate(LOW_RANK, ((query, f"layer{place}"),), rank=rank, saved_bytes=100 - place, risk=0.01)
            for rank in range(1, count + 1)
        )
        for place, count in enumerate(ranks)
    )


def test_one_try_takes_private_or_shared_steps_up_to_a_risk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("merger.beyond.queue.MAX_RISK", 0.5)
    one, both = (("q0", "a"),), (("q0", "b"), ("q1", "b"))
    risks = [Candidate(LOW_RANK, one, risk=risk) for risk in (0.2, 0.3, 0.1)]
    assert together(risks) == tuple(risks[:2])
    assert together([risks[0], Candidate(LOW_RANK, both, risk=0.1), risks[2]]) == tuple(risks[:1])
    alone = Candidate(LOW_RANK, both, risk=3.0)
    assert together([alone, risks[0]]) == (alone,), "a single one may be as risky as it is"


def test_after_a_refusal_half_as_many_are_tried_and_after_success_twice_as_many() -> None:
    queue = Queue.of(_ladders(1, 1, 1, 1, 1))
    assert len(queue.next()) == 5
    halved = queue.after(queue.next(), accepted=False)
    assert len(halved.next()) == 3 and halved.ladders == queue.ladders
    onwards = halved.after(halved.next(), accepted=True)
    assert (onwards.ladders, onwards.size) == (queue.ladders[3:], 6)


def test_what_is_refused_alone_is_tried_at_its_next_rank_and_then_dropped() -> None:
    queue = replace(Queue.of(_ladders(2, 1)), size=1)
    once = queue.after(queue.next(), accepted=False)
    assert [one.rank for one in once.next()] == [2]
    assert once.after(once.next(), accepted=False).ladders == queue.ladders[1:]


def test_what_was_refused_of_private_weights_says_nothing_of_shared_ones() -> None:
    (alone,), (one,), (other,) = _ladders(1, 1, 1)
    both = [replace(c, first=(*c.first, ("q1", "x"))) for c in (one, other)]
    queue = replace(Queue.of([(both[0],), (alone,), (both[1],)]), size=1)
    assert queue.next() == (alone,), "what nobody else has comes first"
    assert queue.after(queue.next(), accepted=False).size == 2


def test_a_queue_is_the_same_from_plain_values() -> None:
    queue = replace(Queue.of(_ladders(2, 1)), size=1)
    assert Queue.from_plain(queue.to_plain()) == queue
