"""Which machines a merge should run on: what each kind and number would take, and the choice as one small program.

The policies are Gavel's (Narayanan et al., OSDI 2020, section 4): least money within a deadline, least time within a
budget. Spot machines are left while there is still time for machines that stay, the safety net of "Can't Be Late" (Wu
et al., NSDI 2024).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

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


def choose_offers(
    jobs: Sequence[Sequence[MachineOffer]],
    deadline_s: float = math.inf,
    budget: float = math.inf,
    fastest: bool = False,
) -> list[MachineOffer] | None:
    """One offer for each job: least money within deadline and budget, or least time if `fastest`; None without any.

    A kind's machines do not take more time together than they have; jobs on one machine run one after the other.
    """
    safe = [_drop_unsafe(offers, deadline_s) for offers in jobs]
    offers = [(job, offer) for job, some in enumerate(safe) for offer in some]
    if not all(safe):
        return None
    seconds, money = (np.array([getattr(offer, name) for _, offer in offers]) for name in ("seconds", "money"))
    busy = seconds * [offer.machines for _, offer in offers]
    member = np.array([[job == own for own, _ in offers] for job in range(len(jobs))], dtype=float)
    kinds = {offer.kind.name: offer.kind for _, offer in offers}
    of_kind = np.array([[offer.kind.name == name for _, offer in offers] for name in kinds], dtype=float)
    scale = max(float(seconds.sum()), 1e-9)  # of the last variable, the time until all are done, as a part of this
    counts = np.array([kind.count for kind in kinds.values()], dtype=float)[:, None]
    constraints = [
        LinearConstraint(np.hstack([member, np.zeros((len(jobs), 1))]), 1, 1),
        LinearConstraint(np.hstack([member * seconds / scale, -np.ones((len(jobs), 1))]), -np.inf, 0),
        LinearConstraint(np.hstack([of_kind * busy / scale, -counts]), -np.inf, 0),
    ]
    if math.isfinite(budget):
        constraints.append(LinearConstraint(np.append(money, 0.0), -np.inf, budget))
    price = money / max(float(money.sum()), 1e-9)
    small = 1e-4  # of two equal choices, the one that is better by the other measure
    costs = np.append(price * (small if fastest else 1.0), 1.0 if fastest else small)
    upper = np.append(np.ones(len(offers)), min(1.0, deadline_s / scale))
    found = milp(
        costs, integrality=np.append(np.ones(len(offers)), 0), bounds=Bounds(0, upper),  # type: ignore[arg-type]
        constraints=constraints,
    )  # fmt: skip
    if found.x is None:
        return None
    return [offers[index][1] for index in np.argmax(member * found.x[:-1], axis=1)]


def _drop_unsafe(offers: Sequence[MachineOffer], deadline_s: float) -> list[MachineOffer]:
    """Without spot machines once only machines that stay are sure to be in time."""
    staying = min((offer.seconds for offer in offers if not offer.kind.spot), default=-math.inf)
    unsafe = deadline_s < staying + MARKET.restart_s + MARKET.interval_s
    return [offer for offer in offers if not (offer.kind.spot and unsafe)]
