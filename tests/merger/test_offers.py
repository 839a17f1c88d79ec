"""The choice of machines is the best of all choices, keeps its limits, and leaves spot machines in time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemel.merger.offers import MARKET, MachineOffer, choose_offer, list_offers
from gemel.merger.prices import MachineKind

HOUR = 3600.0
STAYS = MachineKind(name="stays", price=3.0, count=4)
SPOT = MachineKind(name="spot", price=0.9, spot=True, interruptions=0.2, count=4)
FAST = MachineKind(name="fast", price=10.0)
SPEEDS = {"stays": 1.0, "spot": 1.0, "fast": 5.0}


def choose(offers: Sequence[MachineOffer], **limits: Any) -> str | None:
    chosen = choose_offer(offers, **limits)
    return chosen.name if chosen else None


def test_list_offers_counts_interruptions_and_unshared_machines() -> None:
    offers = {offer.name: offer for offer in list_offers(8 * HOUR, [STAYS, SPOT, FAST], SPEEDS, parallel=2.5)}
    assert list(offers) == ["stays", "2 x stays", "3 x stays", "spot", "2 x spot", "3 x spot", "fast"]
    assert offers["stays"].seconds == 8 * HOUR and offers["stays"].money == 24.0
    assert offers["3 x stays"].seconds == 8 * HOUR / 2.5  # the largest query alone takes so long
    lost = 8 * -math.log(0.8) * MARKET.restart_s
    assert offers["spot"].seconds == pytest.approx(8 * HOUR + lost)
    assert list_offers(1.0, [FAST], {}) == []


def test_choose_offer_takes_the_least_money_within_the_deadline() -> None:
    offers = list_offers(8 * HOUR, [STAYS, SPOT, FAST], SPEEDS, parallel=2.5)
    assert choose(offers) == choose(offers, deadline_s=24 * HOUR) == "spot"
    assert choose(offers, deadline_s=5 * HOUR) == "2 x spot"
    assert choose(offers, deadline_s=1.7 * HOUR) == "fast"  # too late for a spot machine that is taken back
    assert choose(offers, deadline_s=HOUR) is None


def test_choose_offer_takes_the_least_time_within_the_budget() -> None:
    offers = list_offers(8 * HOUR, [STAYS, SPOT, FAST], SPEEDS, parallel=2.5)
    assert choose(offers, budget=20.0, fastest=True) == "fast"
    assert choose(offers, budget=12.0, fastest=True) == "3 x spot"
    assert choose(offers, budget=5.0, fastest=True) is None


def test_choose_offer_leaves_spot_machines_while_others_are_in_time() -> None:
    offers = list_offers(2 * HOUR, [STAYS.model_copy(update={"count": 1}), SPOT], SPEEDS)
    last = 2 * HOUR + MARKET.restart_s + MARKET.interval_s
    assert choose(offers, deadline_s=last + 1) == "spot"
    assert choose(offers, deadline_s=last - 1) == "stays"
    alone = list_offers(2 * HOUR, [SPOT], SPEEDS)
    assert choose(alone, deadline_s=2.1 * HOUR) == "spot"  # nothing else is there


def draw_kind(count: int) -> MachineKind:
    return MachineKind(name=f"k{count}", price=1.0, count=count)


OFFERS = st.lists(
    st.tuples(st.floats(0.1, 10), st.floats(0.1, 10), st.integers(1, 3)).map(
        lambda drawn: MachineOffer(draw_kind(drawn[2]), 1, 100 * drawn[0], drawn[1])
    ),
    min_size=1, max_size=8,
)  # fmt: skip


@settings(max_examples=60)
@given(OFFERS, st.floats(50, 2000), st.floats(1, 30), st.booleans())
def test_choose_offer_is_the_best_of_those_within_the_limits(
    offers: list[MachineOffer], deadline_s: float, budget: float, fastest: bool
) -> None:
    found = choose_offer(offers, deadline_s, budget, fastest)
    fitting = [offer for offer in offers if offer.seconds <= deadline_s and offer.money <= budget]
    assert (found is None) == (not fitting)
    if found is not None:
        name = "seconds" if fastest else "money"
        assert found in fitting and getattr(found, name) == min(getattr(offer, name) for offer in fitting)
