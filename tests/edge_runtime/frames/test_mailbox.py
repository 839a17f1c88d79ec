"""The frames that wait for a query: in order, the oldest dropped where there is no room."""

from __future__ import annotations

import threading

from edge_runtime.frames.ledger import Ledger
from edge_runtime.frames.mailbox import Frame, Mailboxes


def mailboxes() -> tuple[Mailboxes, Ledger]:
    ledger = Ledger("ab")
    return Mailboxes("ab", ledger, depth=2), ledger


def test_frames_wait_in_order_and_the_oldest_goes_when_there_is_no_room():
    boxes, ledger = mailboxes()
    assert boxes.put("a", Frame(0, 1.0)) is None and boxes.put("a", Frame(1, 2.0)) is None
    oldest = boxes.put("a", Frame(2, 3.0))
    assert oldest is not None and oldest.index == 0
    assert boxes.pending() == {"a": (2.0, 3.0)}
    assert ledger.to_json()[0]["dropped"] == {"replaced": 1}
    assert [frame.index for frame in boxes.take("a", 8)] == [1, 2]
    assert boxes.take("a") == []
    assert ledger.pending("a") == 2, "a taken frame is pending until it is settled"


def test_a_drop_takes_the_frame_captured_then_and_no_other():
    boxes, ledger = mailboxes()
    boxes.put("a", Frame(0, 1.0))
    boxes.put("a", Frame(1, 2.0))
    dropped = boxes.drop("a", 1.0, "deadline")
    assert dropped is not None and dropped.index == 0
    assert boxes.drop("a", 1.0, "deadline") is None
    assert boxes.pending() == {"a": (2.0,)}
    assert ledger.to_json()[0]["dropped"] == {"deadline": 1}
    assert ledger.balanced


def test_a_snapshot_holds_what_was_heard_by_then_and_nothing_later():
    heard: list[tuple[str, int]] = []
    boxes = Mailboxes("ab", Ledger("ab"), heard=lambda query, frame: heard.append((query, frame.index)))
    boxes.put("a", Frame(0, 1.0))
    boxes.put("b", Frame(0, 1.5))
    assert boxes.snapshot(lambda: float(len(heard))) == (2.0, {"a": (1.0,), "b": (1.5,)})
    assert heard == [("a", 0), ("b", 0)]


def test_waiting_ends_with_a_frame_or_a_nudge():
    boxes, _ = mailboxes()
    for wake in (boxes.nudge, lambda: boxes.put("b", Frame(0, 0.0))):
        thread = threading.Thread(target=wake)
        thread.start()
        boxes.wait(timeout_s=30)
        thread.join()
    assert boxes.pending() == {"b": (0.0,)}
