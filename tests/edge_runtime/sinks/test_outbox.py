"""The outbox: after any events every message is delivered, dropped for a reason, or queued."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.backoff import BackOff
from edge_runtime.sinks.base import ResultMessage, Undelivered
from edge_runtime.sinks.worker import Outbox, OutboxLimits

RECORD_NBYTES = ResultMessage({}).nbytes


def message(number: int, image_nbytes: int = 0) -> ResultMessage:
    return ResultMessage({"frame": number}, np.zeros(image_nbytes, np.uint8) if image_nbytes else None)


def outbox(messages: int = 3, nbytes: int = 100 * RECORD_NBYTES, tries: int = 3) -> Outbox:
    return Outbox(OutboxLimits(messages, nbytes, tries), BackOff(1.0, 8.0, spread=0.5), lambda: 0.0)


def offer(box: Outbox, *frames: int, image_nbytes: int = 0) -> Outbox:
    for frame in frames:
        box.offer(message(frame, image_nbytes))
    return box


def frames_of(messages: Sequence[ResultMessage]) -> list[int]:
    return [message.record["frame"] for message in messages]


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("offer"), st.integers(1, 60)),
        st.tuples(st.just("take"), st.integers(1, 4)),
        st.tuples(st.just("sent"), st.just(0)),
        st.tuples(st.just("failed"), st.integers(0, 3)),
        st.tuples(st.just("answered"), st.integers(0, 3)),
        st.tuples(st.just("refused"), st.integers(0, 3)),
        st.tuples(st.just("close"), st.just(0)),
        st.tuples(st.just("hurry"), st.just(0)),
    ),
    max_size=60,
)


@given(EVENTS)
def test_outbox_balances_after_any_events(events):
    limit = 5 * RECORD_NBYTES // 2
    box, taken, delivered, now = outbox(nbytes=limit), 0, [], 0.0
    for number, (event, value) in enumerate(events):
        now += 0.3
        if event == "offer":
            box.offer(message(number, value * RECORD_NBYTES // 10))
        elif event == "take":
            taken = len(box.take(value, now)) or taken
        elif event == "sent":
            box.confirm()
        elif event in ("failed", "answered"):
            box.fail(Undelivered.UNREACHABLE, now, min(value, taken), answered=event == "answered")
        elif event == "refused":
            box.reject(Undelivered.REFUSED, min(value, taken))
        elif event == "hurry":
            box.end_pause()
        else:
            box.close()
        assert box.balanced and box.nbytes <= limit and box.queued <= 3 + 4
        delivered.append(box.delivered)
    box.close()
    assert box.offered == box.delivered + box.undelivered.total() and box.queued == 0
    assert delivered == sorted(delivered), "nothing that was delivered is taken back"


@given(st.lists(st.sampled_from(["offer", "take", "sent", "failed"]), max_size=60))
def test_outbox_delivers_in_order_once(events):
    box, now, out = outbox(), 0.0, []
    for number, event in enumerate(events):
        now += 10.0
        if event == "offer":
            box.offer(message(number))
        elif event == "take":
            box.take(2, now)
        elif event == "sent":
            out += frames_of(box._sending)
            box.confirm()
        else:
            box.fail(Undelivered.UNREACHABLE, now)
    assert out == sorted(set(out)) and len(out) == box.delivered


def test_outbox_full_drops_oldest_with_reason():
    box = offer(outbox(), 1, 2, 3, 4)
    assert box.undelivered == {Undelivered.OVERFLOW: 1}
    assert frames_of(box.take(1, 0.0)) == [2]
    box.fail(Undelivered.DISK_FULL, 0.0)
    offer(box, 5, 6)
    assert box.undelivered == {Undelivered.OVERFLOW: 1, Undelivered.DISK_FULL: 2}
    assert frames_of(box.take(9, 100.0)) == [4, 5, 6]
    box.confirm()
    offer(box, 7)
    box.close()
    offer(box, 8)
    assert box.undelivered == {Undelivered.OVERFLOW: 1, Undelivered.DISK_FULL: 2, Undelivered.STOPPED: 2}
    assert box.delivered == 3


def test_outbox_pauses_grow_and_end():
    box, now, rests = offer(outbox(), 1), 0.0, []
    assert box.wait_s(0.0) == 0.0
    for _ in range(6):
        assert frames_of(box.take(1, now)) == [1]
        box.fail(Undelivered.UNREACHABLE, now)
        assert box.take(1, now) == []
        rests.append(box.wait_s(now))
        now += rests[-1]
    assert rests == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    box.end_pause()
    assert frames_of(box.take(1, now)) == [1]
    box.confirm()
    assert box.trouble is None and box.wait_s(now) == float("inf")


def test_outbox_drops_images_before_records():
    box = offer(outbox(messages=10, nbytes=3 * RECORD_NBYTES + 250), 1, 2, 3, image_nbytes=100)
    assert box.queued == 3 and not box.undelivered
    assert [(one.record["frame"], one.image is None) for one in box.take(9, 0.0)] == [(1, True), (2, False), (3, False)]


def test_outbox_gives_up_a_rejected_message():
    box, now = offer(outbox(), 1, 2), 0.0
    for _ in range(3):
        box.take(1, now)
        box.fail(Undelivered.SERVER_ERROR, now, answered=True)
        now += 100.0
    assert box.undelivered == {Undelivered.SERVER_ERROR: 1} and frames_of(box.take(1, now)) == [2]
    box.reject(Undelivered.REFUSED)
    assert box.undelivered == {Undelivered.SERVER_ERROR: 1, Undelivered.REFUSED: 1} and box.queued == 0


def test_outbox_partial_delivery_is_not_repeated():
    box = offer(outbox(), 1, 2, 3)
    box.take(3, 0.0)
    box.fail(Undelivered.UNREACHABLE, 0.0, delivered=2)
    assert box.delivered == 2 and frames_of(box.take(3, 100.0)) == [3]
