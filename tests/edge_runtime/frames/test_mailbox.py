"""The frames that wait for a query: in order, the oldest dropped where there is no room."""

from __future__ import annotations

import threading
import time

import numpy as np

from edge_runtime.queues import Frame, Ledger, Mailboxes


def mailboxes() -> tuple[Mailboxes, Ledger]:
    ledger = Ledger("ab")
    return Mailboxes("ab", ledger, depth=2), ledger


def test_frames_wait_in_order_and_the_oldest_goes_when_there_is_no_room():
    boxes, ledger = mailboxes()
    for number in range(3):
        boxes.put("a", Frame(number, number + 1.0))
    assert boxes.pending() == {"a": (2.0, 3.0)}
    assert ledger.to_json()[0]["dropped"] == {"replaced": 1}
    assert [frame.index for frame in boxes.take("a", 8)] == [1, 2]
    assert boxes.take("a") == []
    assert ledger.to_json()[0]["pending"] == 2, "a taken frame is pending until it is settled"


def test_a_drop_takes_the_frame_captured_then_and_no_other():
    boxes, ledger = mailboxes()
    boxes.put("a", Frame(0, 1.0))
    boxes.put("a", Frame(1, 2.0))
    for _ in range(2):
        boxes.drop("a", 1.0, "deadline")
    assert boxes.pending() == {"a": (2.0,)}
    assert ledger.to_json()[0]["dropped"] == {"deadline": 1}
    assert ledger.balanced


def test_a_snapshot_holds_what_was_heard_by_then_and_nothing_later():
    heard: list[tuple[str, int]] = []
    boxes = Mailboxes("ab", Ledger("ab"), on_frame=lambda query, frame: heard.append((query, frame.index)))
    boxes.put("a", Frame(0, 1.0))
    boxes.put("b", Frame(0, 1.5))
    assert boxes.snapshot(lambda: float(len(heard))) == (2.0, {"a": (1.0,), "b": (1.5,)})
    assert heard == [("a", 0), ("b", 0)]


def test_waiting_ends_with_a_frame_or_a_nudge():
    boxes, _ = mailboxes()
    for wake in (boxes.wake, lambda: boxes.put("b", Frame(0, 0.0))):
        thread = threading.Thread(target=wake)
        thread.start()
        boxes.wait(timeout_s=30)
        thread.join()
    assert boxes.pending() == {"b": (0.0,)}


def test_a_frame_that_a_snapshot_has_seen_wakes_nobody_again():
    boxes, _ = mailboxes()
    boxes.put("a", Frame(0, 0.0))
    boxes.wait(timeout_s=30)
    boxes.snapshot(lambda: 0.0)
    woken: list[float] = []
    clock = time.monotonic
    before = clock()
    boxes.wait(timeout_s=0.05)
    woken.append(clock() - before)
    assert woken[0] >= 0.05 and boxes.pending() == {"a": (0.0,)}


def picture(kilobytes: int = 1) -> np.ndarray:
    return np.zeros((1, 1024 * kilobytes, 1), np.uint8)


def test_pictures_hold_so_many_bytes_at_most_each_counted_once_and_the_oldest_goes_for_all_who_wait_with_it():
    ledger = Ledger("ab")
    boxes = Mailboxes("ab", ledger, max_waiting_bytes=3 * 1024)
    for number in range(5):
        shared = Frame(number, float(number), image=picture())
        for query in "ab":
            boxes.put(query, shared)
        assert boxes.nbytes == 1024 * min(number + 1, 3)
    assert boxes.pending() == {"a": (2.0, 3.0, 4.0), "b": (2.0, 3.0, 4.0)}
    assert [account["dropped"] for account in ledger.to_json()] == [{"memory": 2}] * 2 and ledger.balanced
    boxes.take("a", 3)
    assert boxes.nbytes == 3 * 1024, "b still waits with them"
    boxes.drop("b", 2.0, "deadline")
    assert boxes.nbytes == 2 * 1024
    boxes.put("b", Frame(9, 9.0, image=picture(100)))
    assert boxes.pending() == {"b": (9.0,)} and boxes.nbytes == 100 * 1024, "one alone is always let in"
    boxes.take("b")
    assert boxes.nbytes == 0 and boxes.max_bytes == 100 * 1024
