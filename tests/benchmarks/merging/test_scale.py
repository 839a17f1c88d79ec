"""Merges on paper: bytes once all is shared, and what of it crosses from card to card."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

import benchmarks.merging.scale as scale
from benchmarks.merging.scale import MOMENTS, Model, load_of, neighbourhoods, unique_bytes
from merger.distributed import Shares, cut_bytes, partition
from models.sharing.groups import groups
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
    assert 0 < both.sent_bytes == crossing_of(FOUR, 2), "each of two cards sends once what both have"
    assert both.compute_s * 2 == alone.compute_s, "each has two of four that take as long"


def test_the_planner_of_merges_says_who_sits_where(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def apart(flops: Mapping[str, float], shares: Shares, cards: int) -> list[list[str]]:
        asked.append((dict(flops), {tuple(sorted(users)): nbytes for users, nbytes in shares}, cards))
        return [["a", "d"], ["b", "c"]]

    monkeypatch.setattr(scale, "placed", apart)
    found = load_of(FOUR, 2, 16)
    assert asked == [(dict.fromkeys("abcd", 1000.0), {("a", "b"): 100, ("a", "c"): 50}, 2)]
    assert found.sent_bytes == 150 and found.held_bytes == max(
        sum(one.nbytes for one in part) + MOMENTS * unique_bytes(part) for part in (FOUR[::3], FOUR[1:3])
    )


def crossing_of(models: list[Model], cards: int) -> int:
    """Bytes that cross where the planner puts these models."""
    found = groups([layer for one in models for layer in one.layers], "wide")
    shares = [({query for query, _ in one.members}, one.bytes) for one in found]
    return cut_bytes(partition({one.name: float(one.flops) for one in models}, shares, cards), shares)
