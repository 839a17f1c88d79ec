"""What a merge costs: the machines of each start, their time and money, and the time limit of a budget or deadline."""

from __future__ import annotations

import math
import socket
import time
from dataclasses import dataclass, replace

from gemel.merger.checkpoint import Checkpoint, Step
from gemel.merger.config import MergeOptions
from gemel.merger.distributed import ProcessGroup
from gemel.merger.prices import SECONDS, Spending


@dataclass(frozen=True)
class MergeCost:
    """What a merge took on all its machines; `money` is None where no prices are known.

    `told_seconds` and `told_money` are what it said before it trained; None where it said nothing.
    """

    seconds: float
    flops: float
    currency: str
    money: float | None
    money_per_gib: float | None
    told_seconds: float | None
    told_money: float | None


class CostMeter:
    """Time and money of a merge over all its starts; rank 0 counts, and its machines are all of the group's hosts.

    Work since the last checkpoint, which a kill loses, is not counted.
    """

    def __init__(self, spending: Spending, checkpoint: Checkpoint, group: ProcessGroup) -> None:
        self.spending, self.kind = spending, spending.kind
        self.machines = len(set(group.all_gather_object(socket.gethostname)))
        self._state = checkpoint.state(Step.STARTS)
        starts = self._state.setdefault("starts", [])
        starts.append([self.machines * self.kind.price, checkpoint.seconds])
        self._state.setdefault("date", time.time())
        self._began = time.monotonic() - checkpoint.seconds

    @property
    def seconds(self) -> float:
        """Seconds so far, of all starts."""
        return time.monotonic() - self._began

    def money(self, seconds: float) -> float:
        """Money by the time that the merge has run so long."""
        starts = self._state["starts"]
        ends = [*(began for _, began in starts[1:]), seconds]
        return sum(price * (end - began) for (price, began), end in zip(starts, ends, strict=True)) / SECONDS["h"]

    @property
    def deadline_left_s(self) -> float:
        """Seconds to the deadline, which counts from the first start; the time between starts counts too."""
        deadline = self.spending.deadline_s
        return math.inf if deadline is None else self._state["date"] + deadline - time.time()

    @property
    def max_seconds(self) -> float:
        """Seconds after which budget or deadline is over."""
        limits = [self.seconds + self.deadline_left_s]
        if self.spending.budget is not None:
            price, began = self._state["starts"][-1]
            limits.append(began + (self.spending.budget - self.money(began)) * SECONDS["h"] / price)
        return max(0.0, min(limits))

    def limit(self, options: MergeOptions) -> MergeOptions:
        """The options with budget and deadline as their time limit."""
        minutes = min(self.max_seconds / 60, math.inf if options.max_minutes is None else options.max_minutes)
        return replace(options, max_minutes=minutes if math.isfinite(minutes) else None)

    def tell(self, seconds: float) -> None:
        """Keep the first forecast: so many seconds in all."""
        self._state.setdefault("told", [seconds, self.money(seconds)])

    @property
    def has_told(self) -> bool:
        """Whether there was a forecast, in this start or before."""
        return "told" in self._state

    def cost(self, flops: float, saved_bytes: int) -> MergeCost:
        """What the merge took until now."""
        seconds = self.seconds
        money = self.money(seconds) if self.spending.prices else None
        per_gib = None if money is None or saved_bytes <= 0 else money / (saved_bytes / 2**30)
        told_seconds, told_money = self._state.get("told", (None, None))
        told_money = told_money if self.spending.prices else None
        return MergeCost(seconds, flops, self.spending.currency, money, per_gib, told_seconds, told_money)
