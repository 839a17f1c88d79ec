"""Frames reach a query from one camera alone, and its numbers never come twice, whatever is reloaded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as some

from edge_runtime.queues import Frame, FrameRouter, Ledger, Mailboxes


def intake(*queries: str) -> tuple[FrameRouter, Ledger, list[tuple[str, int]]]:
    """An intake, the ledger behind it, and what was seen of it."""
    ledger, seen = Ledger(queries), []
    boxes = Mailboxes(queries, ledger, depth=1000)
    made = FrameRouter(boxes, lambda query, frame: seen.append((query, frame.index)))
    made.mailboxes = boxes  # type: ignore[attr-defined]
    return made, ledger, seen


def test_what_a_camera_that_was_replaced_still_brings_is_nobodys():
    made, ledger, seen = intake("q")
    old, new = object(), object()
    made.change({"q": old})
    made.put(old, "q", Frame(7, 0.0))
    assert made.change({"q": new}) == 8
    made.put(old, "q", Frame(8, 0.0))
    made.put(new, "q", Frame(8, 0.0))
    made.put(new, "gone", Frame(9, 0.0))
    assert seen == [("q", 7), ("q", 8)] and ledger.to_json()[0]["received"] == 2


def test_nothing_arrives_while_all_else_changes():
    made, ledger, _ = intake("q")
    source = object()
    made.change({"q": source})
    made.put(source, "q", Frame(0, 0.0))

    def meanwhile() -> None:
        ledger.add(["r"])
        made.mailboxes.change(["r"])  # type: ignore[attr-defined]

    made.change({"r": source}, meanwhile)
    made.put(source, "q", Frame(1, 0.0))
    made.put(source, "r", Frame(1, 0.0))
    rows = {row["query"]: row for row in ledger.to_json()}
    assert rows["q"]["dropped"] == {"reload": 1} and rows["q"]["received"] == 1 and rows["r"]["pending"] == 1


MOVES = some.lists(some.tuples(some.integers(0, 2), some.lists(some.integers(0, 2), max_size=6)), max_size=12)


@given(MOVES)
def test_a_number_never_comes_twice_to_a_query_however_it_moves_between_cameras(moves):
    made, ledger, seen = intake("q")
    cameras, numbers = [object(), object(), object()], [0, 0, 0]
    for onto, frames in moves:
        first = made.change({"q": cameras[onto]})
        for camera in frames:
            made.put(cameras[camera], "q", Frame(numbers[camera], 0.0))
            numbers[camera] += 1
            if camera == onto:  # what a camera that gains a query does, from its next frame on
                numbers[onto] = max(numbers[onto], first)
    assert len(set(seen)) == len(seen) and ledger.balanced
