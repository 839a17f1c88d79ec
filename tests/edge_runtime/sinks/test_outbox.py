"""The outbox: whatever happens, each item is delivered, given up for a reason, or waits."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.backoff import BackOff
from edge_runtime.sinks.base import Undelivered
from edge_runtime.sinks.worker import Outbox, OutboxLimits


@dataclass(frozen=True)
class Item:
    number: int
    nbytes: int = 10

    def without_image(self) -> Item:
        return Item(self.number, min(self.nbytes, 10))


def outbox(items: int = 3, nbytes: int = 1000, tries: int = 3) -> Outbox:
    return Outbox(OutboxLimits(items, nbytes, tries), BackOff(1.0, 8.0, spread=0.5), lambda: 0.0)


def offered(box: Outbox, *numbers: int, nbytes: int = 10) -> Outbox:
    for number in numbers:
        box.offer(Item(number, nbytes))
    return box


def numbers(items: list[Item]) -> list[int]:
    return [item.number for item in items]


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
    box, taken, delivered, now = outbox(nbytes=100), 0, [], 0.0
    for number, (event, value) in enumerate(events):
        now += 0.3
        if event == "offer":
            box.offer(Item(number, value))
        elif event == "take":
            taken = len(box.take(value, now)) or taken
        elif event == "sent":
            box.confirm()
        elif event in ("failed", "answered"):
            box.fail("away", now, min(value, taken), answered=event == "answered")
        elif event == "refused":
            box.reject("no", min(value, taken))
        elif event == "hurry":
            box.end_pause()
        else:
            box.close()
        assert box.balanced and box.nbytes <= 100 and box.queued <= 3 + 4
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
            box.offer(Item(number))
        elif event == "take":
            box.take(2, now)
        elif event == "sent":
            out += numbers(box._sending)
            box.confirm()
        else:
            box.fail("away", now)
    assert out == sorted(set(out)) and len(out) == box.delivered


def test_outbox_full_drops_oldest_with_reason():
    box = offered(outbox(), 1, 2, 3, 4)
    assert box.undelivered == {Undelivered.OVERFLOW: 1}
    assert numbers(box.take(1, 0.0)) == [2]
    box.fail("disk_full", 0.0)
    offered(box, 5, 6)
    assert box.undelivered == {Undelivered.OVERFLOW: 1, "disk_full": 2} and numbers(box.take(9, 100.0)) == [4, 5, 6]
    box.confirm()
    offered(box, 7)
    box.close()
    offered(box, 8)
    assert box.undelivered == {Undelivered.OVERFLOW: 1, "disk_full": 2, Undelivered.STOPPED: 2} and box.delivered == 3


def test_outbox_pauses_grow_and_end():
    box, now, rests = offered(outbox(), 1), 0.0, []
    assert box.wait_s(0.0) == 0.0
    for _ in range(6):
        assert numbers(box.take(1, now)) == [1]
        box.fail("away", now)
        assert box.take(1, now) == []
        rests.append(box.wait_s(now))
        now += rests[-1]
    assert rests == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    box.end_pause()
    assert numbers(box.take(1, now)) == [1]
    box.confirm()
    assert box.trouble is None and box.wait_s(now) == float("inf")


def test_outbox_drops_images_before_records():
    box = offered(outbox(items=10, nbytes=250), 1, 2, 3, nbytes=100)
    assert box.queued == 3 and not box.undelivered
    assert [(item.number, item.nbytes) for item in box.take(9, 0.0)] == [(1, 10), (2, 100), (3, 100)]


def test_outbox_gives_up_a_rejected_message():
    box, now = offered(outbox(), 1, 2), 0.0
    for _ in range(3):
        box.take(1, now)
        box.fail("server_error", now, answered=True)
        now += 100.0
    assert box.undelivered == {"server_error": 1} and numbers(box.take(1, now)) == [2]
    box.reject("refused")
    assert box.undelivered == {"server_error": 1, "refused": 1} and box.queued == 0


def test_outbox_partial_delivery_is_not_repeated():
    box = offered(outbox(), 1, 2, 3)
    box.take(3, 0.0)
    box.fail("unreachable", 0.0, delivered=2)
    assert box.delivered == 2 and numbers(box.take(3, 100.0)) == [3]
