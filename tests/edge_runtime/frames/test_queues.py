"""Frames between cameras and queries: every frame is counted once, waits in order, and comes from one camera."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemel.edge_runtime.frames.queues import MAX_URGENCY_RATIO, Frame, FrameRouter, Ledger, Mailboxes, SceneChange

EVENTS = st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(["received", "processed", "late", "failed", "old"])))
MOVES = st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 2), max_size=6)), max_size=12)


@given(EVENTS)
def test_ledger_balances_after_any_events(events):
    ledger, pending = Ledger("ab"), {"a": 0, "b": 0}
    for query, event in events:
        if event == "received":
            ledger.count_received(query)
            pending[query] += 1
        elif pending[query]:
            pending[query] -= 1
            if event == "failed":
                ledger.count_failed(query)
            elif event == "old":
                ledger.count_dropped(query, "old")
            else:
                ledger.count_processed(query, late=event == "late")
        assert ledger.balanced
    for row in ledger.to_json():
        settled = row["processed"] + row["failed"] + sum(row["dropped"].values())
        assert row["received"] == settled + row["pending"] and row["pending"] == pending[row["query"]]


@pytest.mark.parametrize(
    "settle", [lambda b: b.count_processed("a"), lambda b: b.count_failed("a"), lambda b: b.count_dropped("a", "x")]
)
def test_ledger_refuses_to_settle_a_frame_twice(settle):
    ledger = Ledger("a")
    ledger.count_received("a")
    settle(ledger)
    with pytest.raises(RuntimeError, match="query a"):
        settle(ledger)
    assert ledger.balanced


def mailboxes(**limits) -> tuple[Mailboxes, Ledger]:
    ledger = Ledger("ab")
    return Mailboxes("ab", ledger, **limits), ledger


def test_mailbox_replaces_the_oldest_frame():
    boxes, ledger = mailboxes(depth=2)
    for number in range(3):
        boxes.put("a", Frame(number, number + 1.0))
    assert boxes.pending() == {"a": (2.0, 3.0)} and ledger.to_json()[0]["dropped"] == {"replaced": 1}
    assert [frame.index for frame in boxes.take("a", 8)] == [1, 2] and boxes.take("a") == []
    assert ledger.to_json()[0]["pending"] == 2, "a taken frame is pending until it is settled"


def test_mailbox_drop_takes_the_frame_captured_then():
    boxes, ledger = mailboxes()
    boxes.put("a", Frame(0, 1.0))
    boxes.put("a", Frame(1, 2.0))
    for _ in range(2):
        boxes.drop("a", 1.0, "deadline")
    assert boxes.pending() == {"a": (2.0,)} and ledger.to_json()[0]["dropped"] == {"deadline": 1} and ledger.balanced


def test_mailbox_wait_ends_with_a_frame_or_wake():
    boxes, _ = mailboxes()
    for wake in (boxes.wake, lambda: boxes.put("b", Frame(0, 0.0))):
        thread = threading.Thread(target=wake)
        thread.start()
        boxes.wait(timeout_s=30)
        thread.join()
    seen: list[float] = []
    assert boxes.snapshot(lambda: float(len(seen))) == (0.0, {"b": (0.0,)})
    start = time.monotonic()
    boxes.wait(timeout_s=0.05)
    assert time.monotonic() - start >= 0.05, "a frame that a snapshot has seen wakes nothing"


def test_mailbox_pictures_stay_within_their_bytes():
    boxes, ledger = mailboxes(max_waiting_bytes=3 * 1024)
    for number in range(5):
        shared = Frame(number, float(number), image=np.zeros((1, 1024, 1), np.uint8))
        for query in "ab":
            boxes.put(query, shared)
        assert boxes.nbytes == 1024 * min(number + 1, 3), "each picture counts once"
    assert boxes.pending() == {"a": (2.0, 3.0, 4.0), "b": (2.0, 3.0, 4.0)}
    assert [row["dropped"] for row in ledger.to_json()] == [{"memory": 2}] * 2 and ledger.balanced
    boxes.take("a", 3)
    boxes.drop("b", 2.0, "deadline")
    assert boxes.nbytes == 2 * 1024
    boxes.put("b", Frame(9, 9.0, image=np.zeros((1, 1024 * 100, 1), np.uint8)))
    assert boxes.pending() == {"b": (9.0,)} and boxes.nbytes == 100 * 1024, "one picture alone is always accepted"
    boxes.take("b")
    assert boxes.nbytes == 0 and boxes.max_bytes == 100 * 1024


def route(query: str) -> tuple[FrameRouter, Mailboxes, Ledger, list[tuple[str, int]]]:
    """A router, the mailboxes and the ledger behind it, and the frames that passed it."""
    ledger, passed = Ledger([query]), []
    boxes = Mailboxes([query], ledger, depth=1000)
    return FrameRouter(boxes, lambda name, frame: passed.append((name, frame.index))), boxes, ledger, passed


def test_router_drops_frames_of_a_replaced_camera():
    router, _, ledger, passed = route("q")
    old, new = object(), object()
    router.change({"q": old})
    router.put(old, "q", Frame(7, 0.0))
    assert router.change({"q": new}) == 8
    router.put(old, "q", Frame(8, 0.0))
    router.put(new, "q", Frame(8, 0.0))
    router.put(new, "gone", Frame(9, 0.0))
    assert passed == [("q", 7), ("q", 8)] and ledger.to_json()[0]["received"] == 2


def test_router_change_of_queries_drops_waiting_frames():
    router, boxes, ledger, _ = route("q")
    camera = object()
    router.change({"q": camera})
    router.put(camera, "q", Frame(0, 0.0))

    def switch_queries() -> None:
        ledger.add(["r"])
        boxes.change(["r"])

    router.change({"r": camera}, switch_queries)
    router.put(camera, "q", Frame(1, 0.0))
    router.put(camera, "r", Frame(1, 0.0))
    rows = {row["query"]: row for row in ledger.to_json()}
    assert rows["q"]["dropped"] == {"reload": 1} and rows["q"]["received"] == 1 and rows["r"]["pending"] == 1


@given(MOVES)
def test_router_never_repeats_a_frame_number(moves):
    router, _, ledger, passed = route("q")
    cameras, numbers = [object(), object(), object()], [0, 0, 0]
    for target, frames in moves:
        first = router.change({"q": cameras[target]})
        for camera in frames:
            router.put(cameras[camera], "q", Frame(numbers[camera], 0.0))
            numbers[camera] += 1
            if camera == target:  # a camera that gains a query continues there from its next frame on
                numbers[target] = max(numbers[target], first)
    assert len(set(passed)) == len(passed) and ledger.balanced


def test_scene_change_raises_urgency():
    scene = SceneChange({"still": 1.0, "busy": 1.0, "important": 3.0, "unseen": 2.0})
    assert scene.urgency()["important"] == 3.0
    rng = np.random.default_rng(0)
    picture = rng.integers(0, 200, (48, 64, 3), np.uint8)
    for index in range(5):
        scene.add("still", index / 10, picture + np.uint8(index))
        for query in ("busy", "important"):
            scene.add(query, index / 10, rng.integers(0, 256, (48, 64, 3), np.uint8))
    urgency = scene.urgency()
    assert urgency["still"] == 1 / MAX_URGENCY_RATIO < 1 < urgency["busy"] < MAX_URGENCY_RATIO
    assert urgency["important"] == pytest.approx(3 * urgency["busy"], rel=0.1)
    assert urgency["unseen"] == 2.0
    scene.add("busy", 1.0, picture[:10, :10])
    assert scene.urgency()["busy"] == urgency["busy"], "pictures of other sizes are not compared"
