"""What a merge will take: a trial of some steps, the forecast from it, and other machines that would do better.

The FLOPs to come are those of the last whole merge alike, else the part of the ladder's bound that merges use. A
method says what is left wherever that changes, and a forecast that has drifted is reported again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from gemel.merger.config import MergeOptions
from gemel.merger.context import MergeContext
from gemel.merger.cost_meter import CostMeter
from gemel.merger.events import Event
from gemel.merger.offers import MachineOffer, choose_offer, list_offers
from gemel.merger.prices import MachineKind, MergeTrial, read_trials, record_trial
from gemel.merger.training.data import fork_rng
from gemel.models.errors import InputError, duration_text, join_names, money_text
from gemel.models.notes import add_note
from gemel.models.sharing.plan import SharingPlan


@dataclass(frozen=True)
class ForecastConfig:
    """`used_fraction` of the bound of a ladder is what merges use in the mean (benchmarks/merging/told.py)."""

    trial_steps: int = 4
    """The first of them warms up and does not count."""
    used_fraction: float = 0.3
    min_fraction: float = 0.02
    """The least of it; a first merge is refused only where this is too much, and else gets a note."""
    drift: float = 0.2
    """One that differs more from the last one is reported again."""
    min_measured_s: float = 60.0
    """Time after which the merge's own rate replaces the trial's."""


FORECAST = ForecastConfig()


class Forecast:
    """The forecast of one merge; its methods are called on all ranks, and rank 0 tells.

    `merge` tells this merge apart from others (merger.prices.MergeTrial).
    """

    def __init__(self, ctx: MergeContext, meter: CostMeter, merge: str) -> None:
        self._ctx, self._meter, self._merge = ctx, meter, merge
        self._rate, self._tail_s, self._last_s = ctx.speed, meter.seconds, 0.0
        self._end_flops, self._start_flops, self._started = 0.0, ctx.flops.total, time.monotonic()
        self._trial_rate, self.spending, self.kind = self._rate, meter.spending, meter.kind

    def try_steps(self, options: MergeOptions) -> None:
        """Train some steps for the throughput of this merge on this machine; its FLOPs do not count, its time does."""
        ctx, before = self._ctx, self._ctx.flops.total
        if ctx.judged:
            recipe = replace(options.recipe, epochs=1, frames_per_epoch=FORECAST.trial_steps * options.recipe.batch)
            marks = list[tuple[float, float]]()
            with fork_rng(ctx.seed, ctx.device):
                training = ctx.training(ctx.spread_models(SharingPlan(), ctx.judged), recipe)
                training.after_step = lambda: marks.append((_synchronised_clock(), ctx.flops.total))
                training.epoch()
            (begun, first), (ended, last) = marks[0], marks[-1]
            rate = (last - first) / (ended - begun) if ended > begun else ctx.speed
            self._rate = self._trial_rate = ctx.speed = ctx.group.broadcast(rate)
            ctx.flops.total = before
        self._started = time.monotonic()
        self._record()

    def expect(self, bound: Callable[[], float] | None) -> None:
        """Tell what the merge takes if so many FLOPs at most are to come; None: the same bound as before.

        Raises InputError where the first forecast is beyond budget or deadline.
        """
        ctx = self._ctx
        if bound is not None:
            self._end_flops = ctx.flops.total + FORECAST.used_fraction * bound()
        if not ctx.group.is_local:
            ctx.group.run_on_rank0(self._tell)

    def finish(self, flops: float) -> None:
        """Record the whole merge for later forecasts."""
        self._record(flops, self._meter.seconds * self._meter.machines)

    def _record(self, flops: float = 0.0, seconds: float = 0.0) -> None:
        """Record what one machine does, on rank 0."""
        rate = self._trial_rate / self._meter.machines
        if self._ctx.group.rank == 0 and self.spending.prices and math.isfinite(rate):
            trial = MergeTrial(kind=self.kind.name, merge=self._merge, rate=rate, flops=flops, seconds=seconds)
            record_trial(self.spending.prices, trial)

    def _tell(self) -> None:
        trials = read_trials(self.spending.prices, self._merge) if self.spending.prices else []
        left_s, least_s = self._seconds_left(trials)
        now, first = self._meter.seconds, not self._meter.has_told
        total_s = now + left_s
        if abs(total_s - self._last_s) <= FORECAST.drift * self._last_s:
            return
        self._last_s = total_s
        offers = self._offers(max(0.0, left_s - self._tail_s), trials)
        here = MachineOffer(self.kind, self._meter.machines, total_s, self._meter.money(total_s))
        choice = self._choose(offers, now)
        better = choice if choice and choice.name != here.name else None
        others = [offer for offer in _cheapest(offers) if offer.kind != self.kind and offer != better]
        text = "; ".join(self._describe(offer) for offer in (here, *others))
        text += f"; best: {self._describe(better)}" if better else ""
        self._ctx.report(Event.FORECAST, text=text, seconds=total_s, money=here.money, first=first)
        if total_s > self._meter.max_seconds:
            self._refuse(first and now + least_s > self._meter.max_seconds, here, better, offers)
        self._meter.tell(total_s)

    def _seconds_left(self, trials: Sequence[MergeTrial]) -> tuple[float, float]:
        """What is to come on these machines, and the least: training, then evaluating as long as at the beginning."""
        flops, elapsed = self._ctx.flops.total, time.monotonic() - self._started
        whole = next((trial for trial in reversed(trials) if trial.flops > flops), None)
        if elapsed >= FORECAST.min_measured_s and flops > self._start_flops:
            self._rate = (flops - self._start_flops) / elapsed
        elif whole:  # its seconds hold what no FLOPs tell, too
            left_s = max(0.0, whole.seconds * whole.rate / self._rate - self._meter.seconds)
            return left_s, left_s
        left_s = max(0.0, (whole.flops if whole else self._end_flops) - flops) / self._rate
        return left_s + self._tail_s, left_s * FORECAST.min_fraction / FORECAST.used_fraction + self._tail_s

    def _offers(self, work_s: float, trials: Sequence[MergeTrial]) -> list[MachineOffer]:
        """What is left of the merge on every kind whose throughput is known."""
        kinds = self.spending.prices.kinds if self.spending.prices else {self.kind.name: self.kind}
        rates = {trial.kind: trial.rate for trial in trials}
        speeds = {name: kind.speed / (self.kind.speed or 1.0) for name, kind in kinds.items() if kind.speed is not None}
        speeds |= {name: rate / rates[self.kind.name] for name, rate in rates.items() if self.kind.name in rates}
        speeds[self.kind.name] = 1.0
        if self.spending.prices and (unknown := kinds.keys() - speeds.keys()):
            text = f"no throughput is known of {join_names(sorted(unknown))}"
            add_note(self.spending.prices.path, text, "give its `speed`, or run this merge there once")
        flops = [self._ctx.flops.of(query) for query in self._ctx.queries.values()]
        parallel = sum(flops) / max(flops)
        work_s *= min(self._meter.machines, parallel)
        return list_offers(work_s, kinds.values(), speeds, parallel, self._tail_s)

    def _choose(self, offers: Sequence[MachineOffer], now: float) -> MachineOffer | None:
        """The best offer within budget and deadline, None where nothing reaches them."""
        budget = math.inf if self.spending.budget is None else self.spending.budget - self._meter.money(now)
        fastest = self.spending.budget is not None and self.spending.deadline_s is None
        return choose_offer(offers, self._meter.deadline_left_s, budget, fastest)

    def _describe(self, offer: MachineOffer) -> str:
        money = f"{money_text(offer.money, self.spending.currency)}, " if self.spending.prices else ""
        return f"{money}{duration_text(offer.seconds)} on {offer.name}"

    def _refuse(
        self, first: bool, here: MachineOffer, better: MachineOffer | None, offers: Sequence[MachineOffer]
    ) -> None:
        """Say what would reach budget or deadline; an error where the merge is not to begin."""
        late = here.seconds - self._meter.seconds > self._meter.deadline_left_s
        best = better or min(offers, key=lambda offer: offer.seconds if late else offer.money)
        option = "--deadline" if late else "--budget"
        who = "this machine does not reach" if better else "nothing reaches"
        problem = f"{who} it: about {self._describe(here)}"
        hint = f"merge with {self._describe(best)}" if better else f"the best is {self._describe(best)}: give so much"
        if first:
            raise InputError(option, problem, f"{hint}, or --max-minutes for what the time allows")
        add_note(option, problem, f"stop it, and go on with --resume: {hint}" if better else hint)


def _cheapest(offers: Sequence[MachineOffer]) -> list[MachineOffer]:
    """The cheapest offer of each kind."""
    kinds = dict[MachineKind, MachineOffer]()
    for offer in offers:
        kinds[offer.kind] = min(kinds.get(offer.kind, offer), offer, key=lambda one: one.money)
    return list(kinds.values())


def _synchronised_clock() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.monotonic()
