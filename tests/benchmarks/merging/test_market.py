"""The simulated spot market: spells as in the traces, the product's decisions, cost and deadlines by seed."""

from __future__ import annotations

from statistics import fmean

import numpy as np
import pytest

from benchmarks.merging.market import DAY_S, HOUR, ON_DEMAND, TRACES, ZoneDay, draw_day, draw_zone, play_day
from gemel.merger.offers import MARKET
from gemel.merger.prices import MachineKind

SPOT = MachineKind(name="spot", price=0.3 * ON_DEMAND.price, spot=True)


def test_market_days_cost_half_and_keep_their_deadline() -> None:
    days = [draw_day(seed, zones=3) for seed in range(10)]
    assert fmean(day.cost for day in days) <= 0.5 and all(day.in_time for day in days)
    assert any(day.interruptions for day in days)
    assert days[:2] == [draw_day(seed, zones=3) for seed in range(2)]


def test_market_without_spot_machines_costs_what_they_cost_on_demand() -> None:
    nothing = ZoneDay(SPOT, starts_up=False, changes=())
    day = play_day([nothing], 4 * HOUR)
    assert day.in_time and day.interruptions == 0
    assert day.cost == pytest.approx(1 + MARKET.restart_s / (4 * HOUR))


def test_market_with_spot_machines_all_day_costs_their_price() -> None:
    day = play_day([ZoneDay(SPOT, starts_up=True, changes=())], 4 * HOUR)
    assert day.cost == pytest.approx(0.3 * (1 + MARKET.restart_s / (4 * HOUR)))


def test_market_whose_spot_machines_go_is_in_time_on_demand() -> None:
    going = ZoneDay(SPOT, starts_up=True, changes=(2 * HOUR, DAY_S))
    day = play_day([going], 12 * HOUR)
    assert day.in_time and day.interruptions == 1
    assert day.cost == pytest.approx((2 * 0.3 + 10 + 2 * MARKET.restart_s / HOUR) / 12, abs=0.02)


def test_drawn_zone_is_up_as_often_as_its_trace() -> None:
    trace = TRACES[6]
    random = np.random.default_rng(0)
    zones = [draw_zone(trace, random) for _ in range(300)]
    share = fmean(zone.is_up(hour * HOUR) for zone in zones for hour in range(24))
    assert share == pytest.approx(6.06 / (6.06 + 0.81), abs=0.06)
