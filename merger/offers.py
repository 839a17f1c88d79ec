"""Which machines a merge should run on: what each kind and number would take, and the choice of one.

The policies are Gavel's (Narayanan et al., OSDI 2020, section 4): least money within a deadline, least time within a
budget. Spot machines are left while there is still time for machines that stay, the safety net of "Can't Be Late" (Wu
et al., NSDI 2024).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gemel.merger.prices import SECONDS, MachineKind


@dataclass(frozen=True)
class MarketConfig:
    """`restart_s` is what a machine that replaces another costs: it starts, reads the models, and repeats at most a
    minute of work. Offers are compared again every `interval_s`."""

    restart_s: float = 300.0
    interval_s: float = 900.0


MARKET = MarketConfig()


@dataclass(frozen=True)
class MachineOffer:
    """What a merge takes on so many machines of a kind, expected losses by interruptions counted."""

    kind: MachineKind
    machines: int
    seconds: float
    money: float

    @property
    def name(self) -> str:
        """As `2 x g5.xlarge`."""
        return self.kind.name if self.machines == 1 else f"{self.machines} x {self.kind.name}"


def list_offers(
    work_s: float,
    kinds: Iterable[MachineKind],
    speeds: Mapping[str, float],
    parallel: float = 1.0,
    fixed_s: float = 0.0,
) -> list[MachineOffer]:
    """What is left of a merge on each kind of known speed: `work_s` seconds at speed 1, and `fixed_s` at any.

    More than `parallel` machines bring nothing (all FLOPs over those of the largest query).
    """
    offers = []
    for kind in kinds:
        for machines in range(1, min(kind.count, math.ceil(parallel)) + 1) if kind.name in speeds else ():
            busy = fixed_s + work_s / (speeds[kind.name] * min(machines, parallel))
            interruptions = -math.log1p(-kind.interruptions) * machines * busy / SECONDS["h"]
            seconds = busy + interruptions * MARKET.restart_s
            offers.append(MachineOffer(kind, machines, seconds, kind.price * machines * seconds / SECONDS["h"]))
    return offers


def choose_offer(
    offers: Sequence[MachineOffer], deadline_s: float = math.inf, budget: float = math.inf, fastest: bool = False
) -> MachineOffer | None:
    """The offer of least money within deadline and budget, or of least time if `fastest`; None without any.

    Of two equal ones it is the one that is better by the other measure.
    """
    staying = min((offer.seconds for offer in offers if not offer.kind.spot), default=-math.inf)
    is_unsafe = deadline_s < staying + MARKET.restart_s + MARKET.interval_s  # only machines that stay are sure now
    fitting = [offer for offer in offers if offer.seconds <= deadline_s and offer.money <= budget]
    safe = [offer for offer in fitting if not (offer.kind.spot and is_unsafe)]
    order = (lambda one: (one.seconds, one.money)) if fastest else (lambda one: (one.money, one.seconds))
    return min(safe, key=order, default=None)
