"""A day of a drawn spot market: what merges cost against machines on demand, and how often they keep their deadline.

Usage: python -m benchmarks.merging.market [--seeds 200] [--zones 1 3]

The decisions are the product's (gemel.merger.offers). Spells in which a zone has spot machines, and in which it has
none, are drawn log-normally with the means and medians of the published traces of "Can't Be Late" (Wu et al., NSDI
2024; github.com/skypilot-org/spot-traces, availability/1-node/aws-02-15-2023: p3.2xlarge in nine zones of AWS, 45 days
from 15 February 2023, one request each 195 s). A spot machine costs 0.30 of one on demand, plus or minus 15 % by zone:
88 of 293.76 usd for 24 hours of a p3.8xlarge (spell.ml, "A deep dive into AWS spot instance interruptions"). The price
on demand is that of a p3.2xlarge, 3.06 usd an hour. A merge of 4 to 12 hours on demand has 24 hours.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from gemel.merger.offers import MARKET, MachineOffer, choose_offer, list_offers
from gemel.merger.prices import MachineKind
from gemel.text import number, percent, table

HOUR = 3600.0
DAY_S = 24 * HOUR
WORK_H = (4.0, 12.0)
ON_DEMAND = MachineKind(name="on-demand", price=3.06)
SPOT_PRICE, PRICE_SPREAD = 0.30, 0.15
WARM_UP_H = 100.0
"""Drawn before the day, so that it begins anywhere in a spell."""


@dataclass(frozen=True)
class ZoneTrace:
    """Mean and median hours of the spells with spot machines, and of those without."""

    name: str
    up_h: tuple[float, float]
    down_h: tuple[float, float]


TRACES = (
    ZoneTrace("us-east-1a", (0.72, 0.33), (3.58, 0.54)),
    ZoneTrace("us-east-1c", (1.48, 0.49), (1.69, 0.54)),
    ZoneTrace("us-east-1d", (1.66, 0.54), (2.05, 0.70)),
    ZoneTrace("us-east-1f", (2.26, 0.54), (1.56, 0.49)),
    ZoneTrace("us-east-2a", (5.68, 0.87), (1.80, 0.38)),
    ZoneTrace("us-east-2b", (4.26, 1.08), (1.98, 0.70)),
    ZoneTrace("us-west-2a", (6.06, 1.03), (0.81, 0.38)),
    ZoneTrace("us-west-2b", (10.40, 1.41), (1.10, 0.38)),
    ZoneTrace("us-west-2c", (6.81, 0.92), (0.84, 0.38)),
)


@dataclass(frozen=True)
class ZoneDay:
    """Spot machines of a zone: their kind, and the seconds of the day at which they come and go."""

    kind: MachineKind
    starts_up: bool
    changes: tuple[float, ...]

    def is_up(self, now: float) -> bool:
        """Whether there are machines."""
        return self.starts_up ^ (int(np.searchsorted(self.changes, now, side="right")) % 2 == 1)

    def next_change(self, now: float) -> float:
        """When that changes."""
        return next((change for change in self.changes if change > now), math.inf)


@dataclass(frozen=True)
class MarketDay:
    """What a merge took: cost over that on demand, whether it kept its deadline, and how often it was interrupted."""

    cost: float
    in_time: bool
    interruptions: int


def draw_zone(trace: ZoneTrace, random: np.random.Generator) -> ZoneDay:
    """A day of a zone."""
    now, is_up, changes = -WARM_UP_H, bool(random.integers(2)), list[float]()
    starts_up = is_up
    while now < 24:
        mean, median = trace.up_h if is_up else trace.down_h
        now += float(random.lognormal(math.log(median), math.sqrt(2 * math.log(mean / median))))
        if now < 0:
            starts_up = not is_up
        else:
            changes.append(now * HOUR)
        is_up = not is_up
    price = ON_DEMAND.price * SPOT_PRICE * random.uniform(1 - PRICE_SPREAD, 1 + PRICE_SPREAD)
    chance = 1 - math.exp(-1 / trace.up_h[0])
    kind = MachineKind(name=trace.name, price=price, spot=True, interruptions=chance)
    return ZoneDay(kind, starts_up, tuple(changes))


def choose_machine(offers: Sequence[MachineOffer], up: set[str], left_s: float) -> MachineOffer | None:
    """What to run on now; None to wait for a spot machine, which the product only chooses while there is time."""
    now = choose_offer([offer for offer in offers if offer.kind.name in up], left_s)
    if now and now.kind.spot:
        return now
    later = choose_offer(offers, left_s)
    if later and later.kind.spot:
        return None
    return now or next(offer for offer in offers if not offer.kind.spot)  # late, as fast as it can


def play_day(zones: Sequence[ZoneDay], work_s: float) -> MarketDay:
    """A merge of so many seconds on demand in this market."""
    kinds = [ON_DEMAND, *(zone.kind for zone in zones)]
    speeds = {kind.name: 1.0 for kind in kinds}
    now, left_s, money, interruptions, running, starting_s = 0.0, work_s, 0.0, 0, "", 0.0
    while left_s > 1e-6:
        up = {ON_DEMAND.name, *(zone.kind.name for zone in zones if zone.is_up(now))}
        if running and running not in up:
            interruptions += 1
        change = min((zone.next_change(now) for zone in zones), default=math.inf)
        offer = choose_machine(list_offers(left_s, kinds, speeds), up, DAY_S - now)
        step = min(MARKET.interval_s, change - now)
        if offer is None:
            running = ""
        else:
            starting_s = starting_s if offer.kind.name == running else MARKET.restart_s
            running = offer.kind.name
            step = min(step, starting_s + left_s)
            money += offer.kind.price * step / HOUR
            left_s -= max(0.0, step - starting_s)
            starting_s = max(0.0, starting_s - step)
        now += step
    return MarketDay(money / (ON_DEMAND.price * work_s / HOUR), now <= DAY_S, interruptions)


def draw_day(seed: int, zones: int) -> MarketDay:
    """A merge in a market of so many zones, all drawn."""
    random = np.random.default_rng(seed)
    traces = [TRACES[index] for index in random.choice(len(TRACES), zones, replace=False)]
    return play_day([draw_zone(trace, random) for trace in traces], HOUR * random.uniform(*WORK_H))


def main() -> None:
    """Print a row for each number of zones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--zones", type=int, nargs="+", default=[1, 3])
    given = parser.parse_args()
    rows = []
    for zones in given.zones:
        days = [draw_day(seed, zones) for seed in range(given.seeds)]
        costs = sorted(day.cost for day in days)
        rows.append((
            zones, len(days), number(fmean(costs)), number(costs[int(0.95 * len(costs))]), number(costs[-1]),
            percent(fmean(day.in_time for day in days)), number(fmean(day.interruptions for day in days), 1),
        ))  # fmt: skip
    headers = ("zones", "days", "cost / on demand", "95th of 100", "worst", "in time", "interruptions")
    print(table(headers, rows))


if __name__ == "__main__":
    main()
