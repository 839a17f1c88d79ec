"""Merges on paper: bytes once all is shared, and what of it crosses from card to card."""

from __future__ import annotations

from benchmarks.merging.scale import MOMENTS, Model, load_of, neighbourhoods, unique_bytes
from models.sharing.layers import Layer


def model(query: str, kind: str, *layers: tuple[str, int]) -> Model:
    rows = [Layer(query, f"{index}", wide, wide, nbytes, False) for index, (wide, nbytes) in enumerate(layers)]
    return Model(kind, sum(nbytes for _, nbytes in layers) + 8, 1000, tuple(rows))


FOUR = [
    model("a", "x", ("w", 100), ("v", 50)), model("b", "x", ("w", 100), ("w", 100)),
    model("c", "y", ("v", 50)), model("d", "y", ("u", 30)),
]  # fmt: skip


def test_what_can_be_shared_is_there_once_and_what_is_private_for_each() -> None:
    assert unique_bytes(FOUR[:1]) == 158 and unique_bytes(FOUR) == 4 * 8 + 2 * 100 + 50 + 30
    assert [len(part) for part in neighbourhoods(FOUR, 2)] == [2, 2]
    assert sum(map(unique_bytes, neighbourhoods(FOUR, 2))) == unique_bytes(FOUR) + 50


def test_alone_a_card_holds_all_and_sends_nothing_and_two_send_what_both_have() -> None:
    alone, both = load_of(FOUR, 1, 16), load_of(FOUR, 2, 16)
    assert alone.sent_bytes == 0 and alone.held_bytes == sum(one.nbytes for one in FOUR) + MOMENTS * unique_bytes(FOUR)
    assert both.sent_bytes == 50, "half of it twice: v is the only weight on both"
    assert both.held_bytes == sum(one.nbytes for one in FOUR[:2]) + MOMENTS * unique_bytes(FOUR[:2])
    assert both.compute_s * 2 == alone.compute_s
