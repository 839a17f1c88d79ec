from __future__ import annotations

import threading

from edge_runtime.ledger import Ledger
from edge_runtime.mailbox import Frame, Mailboxes


def mailboxes() -> tuple[Mailboxes, Ledger]:
    ledger = Ledger("ab")
    return Mailboxes("ab", ledger), ledger


def test_the_newest_frame_replaces_the_waiting_one_which_counts_as_dropped():
    boxes, ledger = mailboxes()
    boxes.put("a", Frame(0, 1.0))
    replaced = boxes.put("a", Frame(1, 2.0))
    assert replaced is not None and replaced.index == 0
    assert boxes.pending() == {"a": 2.0}
    assert ledger.to_json()[0]["dropped"] == {"replaced": 1}
    taken = boxes.take("a")
    assert taken is not None and taken.index == 1
    assert boxes.take("a") is None
    assert ledger.pending("a") == 1, "a taken frame is pending until it is settled"


def test_a_drop_leaves_alone_the_newer_frame_that_took_its_place():
    boxes, ledger = mailboxes()
    boxes.put("a", Frame(0, 1.0))
    boxes.put("a", Frame(1, 2.0))
    assert boxes.drop("a", 1.0, "deadline") is None
    assert boxes.pending() == {"a": 2.0}
    assert boxes.drop("a", 2.0, "deadline") is not None
    assert ledger.to_json()[0]["dropped"] == {"deadline": 1, "replaced": 1}
    assert ledger.balanced


def test_waiting_ends_with_a_frame_or_a_nudge():
    boxes, _ = mailboxes()
    for wake in (boxes.nudge, lambda: boxes.put("b", Frame(0, 0.0))):
        thread = threading.Thread(target=wake)
        thread.start()
        boxes.wait(timeout_s=30)
        thread.join()
    assert boxes.pending() == {"b": 0.0}
