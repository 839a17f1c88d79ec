"""`gemel plan`: before anything is shipped, what fits, what swaps, what rate each query has and what limits it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edge_runtime.policies import policy_named
from edge_runtime.rehearsal.profiles import PROFILES
from edge_runtime.rehearsal.simulator import Simulation, simulate
from edge_runtime.schedule import Policy
from edge_runtime.schedule.costs import Costs
from gemel.planning.conditions import STANDARD, Conditions
from gemel.planning.subject import Subject, subject_of
from gemel.text import percent, size, table
from models.errors import one_line

DURATION_S = 60.0
# A query that brings this share of its frames in time is not called limited.
ENOUGH = 0.98
FITS_NOT, TOO_SLOW, MEMORY, DEVICE = "does not fit", "slower than its SLA", "memory", "device"


@dataclass(frozen=True)
class Planned:
    """A plan as the virtual clock predicts it; keys of `to_json` are those of `gemel plan --json`."""

    subject: Subject
    policy: str
    fits: bool
    resident_bytes: int
    bytes_moved_per_s: float
    queries: tuple[dict[str, Any], ...]

    @property
    def in_time(self) -> float:
        """The share of all frames that are answered in time."""
        return self._share("fps")

    @property
    def in_time_if_all_fits(self) -> float:
        """The same with memory for all weights at once: what more memory could bring, and no faster device."""
        return self._share("fps_if_all_fits")

    def _share(self, key: str) -> float:
        return sum(row[key] for row in self.queries) / sum(row["asked_fps"] for row in self.queries)

    def to_json(self) -> dict[str, Any]:
        return {
            "source": self.subject.source,
            "device": self.subject.device,
            "modelled": self.subject.modelled,
            "sharing": self.subject.sharing,
            "policy": self.policy,
            "memory_bytes": self.subject.memory_bytes,
            "device_bytes": self.subject.device_bytes,
            "all_bytes": self.subject.all_bytes,
            "fits": self.fits,
            "resident_bytes": self.resident_bytes,
            "bytes_moved_per_s": self.bytes_moved_per_s,
            "asked_load": self.subject.asked_load,
            "in_time_fraction": self.in_time,
            "in_time_fraction_if_all_fits": self.in_time_if_all_fits,
            "queries": list(self.queries),
        }

    def to_text(self) -> str:
        rows = [
            (row["id"], size(row["alone_bytes"]), f"{row['run_ms']:.0f} ms", f"{row['sla_ms']:.0f} ms",
             _weights(row), f"{row['fps']:.3g}", f"{row['asked_fps']:.3g}",
             f"{row['fps_if_all_fits']:.3g}", percent(row["drop_fraction"], 0),
             "-" if row["age_p95_ms"] is None else f"{row['age_p95_ms']:.0f} ms", " and ".join(row["limited_by"]))
            for row in self.queries
        ]  # fmt: skip
        headers = (
            "query", "needs alone", "one run", "SLA", "weights", "fps", "of", "if all fits", "dropped", "age p95",
            "limited by",
        )  # fmt: skip
        swapped = "nothing is swapped" if self.fits else f"{size(self.bytes_moved_per_s)} a second are swapped"
        return "\n".join([
            table(headers, rows),
            "",
            f"{one_line(self.subject.named())}, policy {self.policy}: {percent(self.in_time, 0)} of all frames "
            f"in time, {percent(self.in_time_if_all_fits, 0)} if all weights fitted; {swapped}, at most "
            f"{size(self.resident_bytes)} of weights at a time",
            f"with no loads at all, runs would take {percent(self.subject.asked_load, 0)} of the device's time at best",
            self.subject.needs(),
        ])  # fmt: skip


@dataclass(frozen=True)
class Compared:
    """The same plan on every device, for whoever has yet to buy one."""

    plans: tuple[Planned, ...]

    def to_json(self) -> dict[str, Any]:
        return {"devices": [plan.to_json() for plan in self.plans]}

    def to_text(self) -> str:
        rows = [
            (plan.subject.device, size(plan.subject.device_bytes or 0), percent(plan.subject.asked_load, 0),
             percent(plan.in_time, 0),
             percent(plan.in_time_if_all_fits, 0), size(plan.bytes_moved_per_s) + "/s",
             f"{sum(not row['limited_by'] for row in plan.queries)} of {len(plan.queries)}",
             ", ".join(row["id"] for row in plan.queries if TOO_SLOW in row["limited_by"]) or "none")
            for plan in self.plans
        ]  # fmt: skip
        headers = (
            "device", "its memory", "its time asked", "frames in time", "if all fits", "swapped",
            "queries served in full", "slower than their SLA",
        )  # fmt: skip
        first = self.plans[0]
        subject = first.subject
        return "\n".join([
            table(headers, rows),
            "",
            f"{one_line(subject.source)} ({subject.sharing}) with {size(subject.memory_bytes)} (virtual clock, "
            f"modelled), policy {first.policy}",
            subject.needs(),
        ])  # fmt: skip


def plan_box(source: str | Path, conditions: Conditions = STANDARD) -> Planned:
    """Predict what a bundle, or a workload's models, would do under these conditions.

    A query is `resident` when its weights stay once they are there (looked at in the second half of a simulated
    minute); `fps` counts results in time, `fps_if_all_fits` those with memory for everything, `drop_fraction` the
    frames that are not in time. `limited_by`: `memory` when more of it would help, `device` when frames are lost even
    with memory for everything, those aside that a resident query lost before its weights had come. `fits`: all
    weights and the largest workspace have room together. A query that overflows copies `overflow_bytes` in every run,
    which leaves `overflow_fps` runs a second at most. Raises InputError for a bad file, device, size or policy.
    """
    chosen, seed = policy_named(conditions.policy), conditions.seed
    subject = subject_of(source, conditions)
    fits = subject.all_bytes <= subject.memory_bytes
    played = _played(subject, subject.costs, chosen, subject.memory_bytes, seed)
    roomy = played if fits else _played(subject, subject.whole, chosen, subject.all_bytes, seed)
    costs, whole, unfit, overflowing = subject.costs, subject.whole, subject.unfit(), subject.overflowing
    staying = _staying(played) - overflowing.keys()
    queries = []
    awaited = _lost_while_loading(played, staying)
    for row, best in zip(played.per_query(), roomy.per_query(), strict=True):
        cost, asked = costs.queries[row["id"]], subject.demands[row["id"]].fps
        in_time, at_best = row["processed"] - row["late"], best["processed"] - best["late"]
        queries.append({
            "id": row["id"],
            "resident": row["id"] in staying,
            "fps": in_time / DURATION_S,
            "asked_fps": asked,
            "fps_if_all_fits": at_best / DURATION_S,
            "drop_fraction": 1 - in_time / row["received"] if row["received"] else 0.0,
            "age_p95_ms": row["age_p95_ms"],
            "alone_bytes": whole.alone_bytes(row["id"]),
            "overflow_bytes": overflowing.get(row["id"], 0),
            "overflow_fps": 1 / cost.run_s if row["id"] in overflowing else None,
            "run_ms": 1000 * cost.run_s,
            "sla_ms": 1000 * cost.sla_s,
            "limited_by": [FITS_NOT] if row["id"] in unfit else _limits(whole.queries[row["id"]].run_s > cost.sla_s,
                                                                        in_time, at_best,
                                                                        row["received"] - awaited[row["id"]]),
        })  # fmt: skip
    resident = max((change.resident_bytes for change in played.changes), default=0)
    return Planned(subject, conditions.policy, fits, resident, played.bytes_moved / DURATION_S, tuple(queries))


def plan_everywhere(source: str | Path, conditions: Conditions = STANDARD) -> Compared:
    """`plan_box` on every device there is a profile of."""
    return Compared(tuple(plan_box(source, replace(conditions, device=device)) for device in PROFILES))


def _weights(row: Mapping[str, Any]) -> str:
    if row["overflow_bytes"]:
        return f"overflow of {size(row['overflow_bytes'])}"
    return "stays" if row["resident"] else "swaps"


def _played(subject: Subject, costs: Costs, policy: Policy, memory_bytes: int, seed: int) -> Simulation:
    arrivals = subject.arrivals(DURATION_S, seed)
    return simulate(costs, arrivals, memory_bytes, policy, subject.demands)


def _limits(too_slow: bool, in_time: int, at_best: int, received: int) -> list[str]:
    if too_slow:
        return [TOO_SLOW]
    if in_time >= ENOUGH * received:
        return []
    return [MEMORY] * (in_time < ENOUGH * at_best) + [DEVICE] * (at_best < ENOUGH * received) or [MEMORY]


def _lost_while_loading(played: Simulation, staying: Collection[str]) -> Counter[str]:
    """Frames without a result that came before the weights of their query, of those that stay, were all there."""
    needed = {query: played.costs.queries[query].needed for query in staying}
    there = {
        query: max((one.at_s for one in played.changes if not names.isdisjoint(one.loaded)), default=0.0)
        for query, names in needed.items()
    }
    lost = [frame for frame in played.frames if frame.finished_at is None]
    return Counter(frame.query for frame in lost if frame.captured_at < there.get(frame.query, 0.0))


def _staying(played: Simulation) -> set[str]:
    """The queries whose weights are all there at half time and stay until the end."""
    half = DURATION_S / 2
    resident: set[str] = set()
    for change in played.changes:
        if change.at_s <= half:
            resident.difference_update(change.evicted)
            resident.update(change.loaded)
        else:
            resident.difference_update(change.evicted)
    return {query for query, cost in played.costs.queries.items() if cost.needed <= resident}
