"""The outbox: after any events every message is delivered, dropped for a reason, or queued."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemel.edge_runtime.backoff import BackOff
from gemel.edge_runtime.sinks.base import ResultMessage, Undelivered
from gemel.edge_runtime.sinks.worker import Outbox, OutboxLimits

RECORD_NBYTES = ResultMessage({}).nbytes


def make_message(number: int, image_nbytes: int = 0) -> ResultMessage:
    return ResultMessage({"frame": number}, np.zeros(image_nbytes, np.uint8) if image_nbytes else None)


def make_outbox(*frames: int, messages: int = 3, nbytes: int = 100 * RECORD_NBYTES, image_nbytes: int = 0) -> Outbox:
    outbox = Outbox(OutboxLimits(messages, nbytes, attempts=3), BackOff(1.0, 8.0, spread=0.5), lambda: 0.0)
    for frame in frames:
        outbox.offer(make_message(frame, image_nbytes))
    return outbox


def frame_numbers(messages: Sequence[ResultMessage]) -> list[int]:
    return [message.record["frame"] for message in messages]


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("offer"), st.integers(1, 60)),
        st.tuples(st.sampled_from(["confirm", "fail", "answer", "reject"]), st.integers(0, 4)),
        st.tuples(st.just("close"), st.just(0)),
    ),
    max_size=60,
)


@given(EVENTS)
def test_outbox_balances_and_keeps_order_after_any_events(events):
    limit = 5 * RECORD_NBYTES // 2
    outbox, taken, in_order = make_outbox(nbytes=limit), [], []
    for number, (event, value) in enumerate(events):
        before = outbox.delivered
        if event == "offer":
            outbox.offer(make_message(number, value * RECORD_NBYTES // 10))
            taken = taken or frame_numbers(outbox.take(2))
        elif event == "confirm":
            outbox.confirm()
        elif event == "reject":
            outbox.reject(Undelivered.REFUSED, value)
        elif event == "close":
            outbox.close()
        else:
            outbox.fail(Undelivered.UNREACHABLE, float(number), value, answered=event == "answer")
        if event != "offer":
            in_order += taken[: outbox.delivered - before]
            taken = []
        assert outbox.offered == outbox.delivered + outbox.undelivered.total() + outbox.queued
        assert outbox.nbytes <= limit and outbox.queued <= 3
    assert in_order == sorted(set(in_order)) and len(in_order) == outbox.delivered, "in order, each once"


def test_outbox_full_drops_oldest_with_reason():
    outbox = make_outbox(1, 2, 3, 4)
    assert outbox.undelivered == {Undelivered.OVERFLOW: 1} and frame_numbers(outbox.take(1)) == [2]
    outbox.offer(make_message(5))
    outbox.fail(Undelivered.DISK_FULL, 0.0)
    assert outbox.undelivered == {Undelivered.OVERFLOW: 2}, "3 is dropped: 2 is being sent"
    outbox.offer(make_message(6))
    assert outbox.undelivered == {Undelivered.OVERFLOW: 2, Undelivered.DISK_FULL: 1}
    assert frame_numbers(outbox.take(9)) == [4, 5, 6]
    outbox.confirm()
    outbox.offer(make_message(7))
    outbox.close()
    outbox.offer(make_message(8))
    assert outbox.undelivered == {Undelivered.OVERFLOW: 2, Undelivered.DISK_FULL: 1, Undelivered.STOPPED: 2}
    assert outbox.delivered == 3


def test_outbox_pauses_grow_and_end():
    outbox, now, pauses = make_outbox(1), 0.0, []
    for _ in range(6):
        assert outbox.pause_s(now) == 0.0 and frame_numbers(outbox.take(1)) == [1]
        outbox.fail(Undelivered.UNREACHABLE, now)
        pauses.append(outbox.pause_s(now))
        now += pauses[-1]
    assert pauses == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    outbox.confirm()
    assert outbox.trouble is None and outbox.pause_s(0.0) == 0.0


def test_outbox_drops_images_before_records():
    outbox = make_outbox(1, 2, 3, messages=10, nbytes=3 * RECORD_NBYTES + 250, image_nbytes=100)
    assert [message.image is None for message in outbox.take(9)] == [True, False, False] and not outbox.undelivered


def test_outbox_gives_up_a_rejected_message():
    outbox = make_outbox(1, 2)
    for _ in range(3):
        outbox.take(1)
        outbox.fail(Undelivered.SERVER_ERROR, 0.0, answered=True)
    assert outbox.undelivered == {Undelivered.SERVER_ERROR: 1} and frame_numbers(outbox.take(1)) == [2]
    outbox.reject(Undelivered.REFUSED)
    assert outbox.undelivered == {Undelivered.SERVER_ERROR: 1, Undelivered.REFUSED: 1} and outbox.queued == 0


@pytest.mark.parametrize("delivered", [0, 1, 2])
def test_outbox_partial_delivery_is_not_repeated(delivered):
    outbox = make_outbox(1, 2, 3)
    outbox.take(3)
    outbox.fail(Undelivered.UNREACHABLE, 0.0, delivered)
    assert outbox.delivered == delivered and frame_numbers(outbox.take(3)) == [1, 2, 3][delivered:]
