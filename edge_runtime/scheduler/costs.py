"""Costs: what runs and loads take, as plain numbers that the scheduler, the simulator and the box all read.

`Costs` are known beforehand, `CostEstimates` corrects them with every run and load, `tensor_groups` reduces thousands
of tensors to a hundred names. The memory settings are the budgets under which methods are compared.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate, pairwise
from typing import Any, TypeVar

from gemel.edge_runtime.memory.allocator import footprint_bytes
from gemel.models.errors import InputError

BATCHES = (1, 2, 4, 8)
"""The batch sizes that are profiled; what lies between them is interpolated."""

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class BatchCost:
    """One run of `count` frames together: seconds for all of them, workspace in bytes."""

    count: int
    run_s: float
    workspace_bytes: int


@dataclass(frozen=True, slots=True)
class QueryCost:
    """One query's costs: its tensors by content name in load order, one run in seconds, its workspace in bytes.

    `run_s` and `workspace_bytes` are those of one frame; `larger` holds what is known of larger batches, in
    ascending order; costs between two known batches lie on the line between them. A tensor named twice counts once.
    """

    tensors: tuple[str, ...]
    run_s: float
    workspace_bytes: int
    sla_s: float
    larger: tuple[BatchCost, ...] = ()
    needed: frozenset[str] = field(init=False, repr=False, compare=False)
    runs_s: tuple[float, ...] = field(init=False, repr=False, compare=False)
    workspaces: tuple[int, ...] = field(init=False, repr=False, compare=False)

    @classmethod
    def of_batches(cls, tensors: Iterable[str], sla_s: float, batches: Iterable[BatchCost]) -> QueryCost:
        """The costs of a query with these batches, of which the first is of one frame."""
        first, *larger = batches
        return cls(tuple(tensors), first.run_s, first.workspace_bytes, sla_s, tuple(larger))

    def __post_init__(self) -> None:
        if self.run_s < 0 or self.workspace_bytes < 0 or self.sla_s <= 0:
            raise ValueError(f"a cost is negative or the SLA is not positive: {self}")
        known = [BatchCost(1, self.run_s, self.workspace_bytes), *self.larger]
        if any(a.count >= b.count or a.run_s > b.run_s for a, b in pairwise(known)):
            raise ValueError(f"larger batches must ascend and take no less time: {self.larger}")
        object.__setattr__(self, "tensors", tuple(dict.fromkeys(self.tensors)))
        object.__setattr__(self, "needed", frozenset(self.tensors))
        object.__setattr__(self, "runs_s", tuple(_interpolate([(one.count, one.run_s) for one in known])))
        spaces = _interpolate([(one.count, one.workspace_bytes) for one in known])
        object.__setattr__(self, "workspaces", tuple(round(nbytes) for nbytes in spaces))

    @property
    def largest(self) -> int:
        """The largest batch whose cost is known."""
        return len(self.runs_s)

    @property
    def frame_s(self) -> float:
        """Seconds of a frame in the best batch."""
        return min(run_s / count for count, run_s in enumerate(self.runs_s, 1))

    def run_of(self, count: int) -> float:
        """Seconds that `count` frames take in one run; ValueError beyond the largest known batch."""
        return self.run_s if count == 1 else self.runs_s[self._index(count)]

    def workspace_of(self, count: int) -> int:
        """Workspace of `count` frames in one run."""
        return self.workspace_bytes if count == 1 else self.workspaces[self._index(count)]

    def _index(self, count: int) -> int:
        if not 1 <= count <= len(self.runs_s):
            raise ValueError(f"nothing is known of batches of {count}, only up to {self.largest}")
        return count - 1

    def with_run_s(self, run_s: float) -> QueryCost:
        """The same query with another run time of one frame, those of larger batches in proportion.

        Where no time was known, a batch takes as long as its frames one after the other.
        """
        known = self.run_s
        runs_s = tuple(run_s * (one / known if known > 0 else count) for count, one in enumerate(self.runs_s, 1))
        return self.with_runs_s(runs_s)

    def with_runs_s(self, known_s: Iterable[float]) -> QueryCost:
        """The same query with other run times of all batches; a batch takes at least what smaller ones do."""
        runs_s = tuple(accumulate(known_s, max))
        larger = tuple(BatchCost(one.count, runs_s[one.count - 1], one.workspace_bytes) for one in self.larger)
        return _replace_fields(self, run_s=runs_s[0], larger=larger, runs_s=runs_s)


def _interpolate(known: Sequence[tuple[int, float]]) -> list[float]:
    """The value of every batch from 1 to the largest known, on the line between its neighbours.

    Worked out once, since every decision looks several up.
    """
    every = [known[0][1]]
    for (low, below), (high, above) in pairwise(known):
        every += [below + (count - low) / (high - low) * (above - below) for count in range(low + 1, high)]
        every.append(above)
    return every


@dataclass(frozen=True, slots=True)
class JointCost:
    """One pass for frames of several queries, which may be of any of `queries`: `cost` counts all frames of a run.

    `cost` names no tensors: a run needs those of the queries whose frames it takes.
    """

    queries: tuple[str, ...]
    cost: QueryCost

    def without(self, queries: Collection[str]) -> JointCost | None:
        """The same pass without these queries; None where fewer than two are left."""
        left = tuple(query for query in self.queries if query not in queries)
        return JointCost(left, self.cost) if len(left) > 1 else None


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of all queries on one device.

    `tensor_bytes` are bytes as stored; they are what a load moves. What a resident tensor occupies is its
    footprint, and every comparison with a budget is made in footprints. A load takes `load_latency_s` once and then
    the bytes at `copy_bytes_per_s`. `footprints` follow from `tensor_bytes` unless given. `joint` are the passes that
    serve several queries; a query belongs to one at most.
    """

    queries: Mapping[str, QueryCost]
    tensor_bytes: Mapping[str, int]
    copy_bytes_per_s: float
    load_latency_s: float = 0.0
    footprints: Mapping[str, int] = field(default_factory=dict, repr=False, compare=False)
    joint: tuple[JointCost, ...] = ()

    def __post_init__(self) -> None:
        if self.copy_bytes_per_s <= 0 or self.load_latency_s < 0:
            raise ValueError("copy_bytes_per_s must be positive and load_latency_s not negative")
        for query, cost in self.queries.items():
            # Not by a difference of sets: that would look at all tensors for every query.
            unknown = [name for name in cost.needed if name not in self.tensor_bytes]
            if unknown:
                raise ValueError(f"query {query} needs tensors of unknown size: {sorted(unknown)[:3]}")
        if not self.footprints:
            occupied = {name: footprint_bytes(nbytes) for name, nbytes in self.tensor_bytes.items()}
            object.__setattr__(self, "footprints", occupied)

    def load_s(self, nbytes: int) -> float:
        """Seconds one load of `nbytes` takes; nothing to load takes no time."""
        return self.load_latency_s + nbytes / self.copy_bytes_per_s if nbytes else 0.0

    def moved_bytes(self, names: Iterable[str]) -> int:
        """Bytes a load of these tensors moves."""
        return sum(map(self.tensor_bytes.__getitem__, names))

    def resident_bytes(self, names: Collection[str]) -> int:
        """Bytes these tensors occupy when resident."""
        return sum(map(self.footprints.__getitem__, names))

    def weights_bytes(self, query: str) -> int:
        """Bytes one query's tensors occupy when resident."""
        return self.resident_bytes(self.queries[query].needed)

    def alone_bytes(self, query: str) -> int:
        """The least budget under which this query can run: its resident weights and its workspace."""
        return self.weights_bytes(query) + self.queries[query].workspace_bytes

    def joint_of(self, query: str) -> JointCost | None:
        """The pass that serves a query beside others, if there is one."""
        return next((joint for joint in self.joint if query in joint.queries), None)

    def with_joint(self, joint: Iterable[JointCost | None]) -> Costs:
        """The same costs with other joint passes."""
        return _replace_fields(self, joint=tuple(one for one in joint if one is not None))

    def with_query(self, query: str, cost: QueryCost) -> Costs:
        """The same costs with another cost of a query that needs the same tensors."""
        return _replace_fields(self, queries={**self.queries, query: cost})


def _replace_fields(value: Value, **changes: Any) -> Value:
    """A copy of a frozen dataclass with fields replaced and nothing checked or computed again.

    Costs are corrected with every frame; checking thousands of tensors each time would cost more than a frame.
    """
    copy = object.__new__(type(value))
    for one in fields(value):  # type: ignore[arg-type]
        object.__setattr__(copy, one.name, changes.get(one.name, getattr(value, one.name)))
    return copy


def all_bytes(costs: Costs) -> int:
    """The least budget in which nothing is ever swapped: all weights and the largest workspace."""
    largest = max(cost.workspace_bytes for cost in costs.queries.values())
    return costs.resident_bytes(costs.tensor_bytes.keys()) + largest


def unshared_costs(costs: Costs) -> Costs:
    """The same costs with nothing shared: a tensor that several queries need becomes one copy for each.

    Names become `tensor@query` (`stored_name` undoes that).
    """
    owners = [(query, name) for query, cost in costs.queries.items() for name in cost.tensors]
    sizes, footprints = (
        {f"{name}@{query}": of[name] for query, name in owners} for of in (costs.tensor_bytes, costs.footprints)
    )
    queries = {
        query: replace(cost, tensors=tuple(f"{name}@{query}" for name in cost.tensors))
        for query, cost in costs.queries.items()
    }
    return Costs(queries, sizes, costs.copy_bytes_per_s, costs.load_latency_s, footprints)


def stored_name(name: str) -> str:
    """The content name behind a name of `unshared_costs`."""
    return name.rpartition("@")[0] or name


MAX_TENSOR_GROUPS = 256


@dataclass(frozen=True, eq=False)
class TensorGroups:
    """The costs over groups of tensors, and the tensors of each group in load order."""

    costs: Costs
    tensors: Mapping[str, tuple[str, ...]]

    def resident_groups(self, resident: Set[str]) -> frozenset[str]:
        """The groups of which every tensor is resident."""
        return frozenset(group for group, names in self.tensors.items() if all(name in resident for name in names))

    def tensor_names(self, groups: Iterable[str]) -> tuple[str, ...]:
        """The tensors of these groups."""
        return tuple(name for group in groups for name in self.tensors[group])


def tensor_groups(costs: Costs, group_bytes: int | None = None) -> TensorGroups:
    """Tensors that the same queries need become one group, in load order, named by its first tensor.

    Groups hold at most `group_bytes` (1/MAX_TENSOR_GROUPS of all bytes unless given) or a single tensor; what a query
    needs, its bytes and its footprint stay exactly the same.
    """
    limit = group_bytes or max(1, sum(costs.tensor_bytes.values()) // MAX_TENSOR_GROUPS)
    users: dict[str, list[str]] = {}
    for query, cost in costs.queries.items():
        for name in cost.tensors:
            users.setdefault(name, []).append(query)
    tensors: dict[str, list[str]] = {}
    sizes: dict[str, int] = {}
    group_of: dict[str, str] = {}
    unfilled: dict[tuple[str, ...], str] = {}
    for name, by in users.items():
        group, nbytes = unfilled.get(tuple(by)), costs.tensor_bytes[name]
        if group is None or sizes[group] + nbytes > limit:
            group = unfilled[tuple(by)] = name
            tensors[group], sizes[group] = [], 0
        group_of[name] = group
        tensors[group].append(name)
        sizes[group] += nbytes
    queries = {
        query: replace(cost, tensors=tuple(group_of[name] for name in cost.tensors))
        for query, cost in costs.queries.items()
    }
    footprints = {group: costs.resident_bytes(names) for group, names in tensors.items()}
    small = Costs(queries, sizes, costs.copy_bytes_per_s, costs.load_latency_s, footprints, costs.joint)
    return TensorGroups(small, {group: tuple(names) for group, names in tensors.items()})


def coalesce_tensors(costs: Costs) -> Costs:
    """The same costs over groups of tensors."""
    return tensor_groups(costs).costs


# Share of the newest measurement in a running average of costs.
NEWEST_SHARE = 0.2
# The same of a batch's time over that of one frame, so that a box that throttles changes all times alike.
BATCH_SHARE = 0.05
# How many mean deviations a run is expected to take longer than the average, as in TCP's timer (Jacobson 1988).
DEVIATIONS = 4.0
# A run counts as at most so many times the average, which a box that throttles still reaches within a few runs. A stall
# of a second would else bring the average near to an SLA of 200 ms, and frames of the next seconds would be dropped.
MAX_TIMES_AVERAGE = 3.0
# How much a run time is lowered for each frame that it cost.
LOWER_SHARE = 0.05
# Loads smaller than this say more about the latency than about the rate of copying.
RATE_FROM_BYTES = 2**20


class CostEstimates:
    """Running averages of what runs and copies take: a box that throttles is followed, a single stall is not.

    `costs` is the present belief (`_RunTimes`), of queries and of passes for several.
    """

    def __init__(self, costs: Costs, best_s: Mapping[str, float] | None = None) -> None:
        self.costs = costs
        self.best_s = dict(best_s or {})
        self._runs = {query: _RunTimes(cost) for query, cost in costs.queries.items()}
        self._passes: dict[tuple[str, ...], _RunTimes] = {}

    def mean_s(self, query: str) -> float:
        """The average of a run of one frame."""
        return self._runs[query].mean_s

    def set_measured(self, run_s: Mapping[str, float], copy_bytes_per_s: float) -> None:
        """Take over what the warm-up measured: seconds of a run of one frame, and the rate of copying."""
        for query, seconds in run_s.items():
            self.best_s[query] = seconds
            self._runs[query] = _RunTimes(self.costs.queries[query].with_run_s(seconds))
            self._update(query)
        self.costs = _replace_fields(self.costs, copy_bytes_per_s=copy_bytes_per_s)

    def record_load(self, query: str, moved_bytes: int, seconds: float) -> None:
        """A load for `query` moved so many bytes in so long."""
        if moved_bytes >= RATE_FROM_BYTES and seconds > 0:
            rate = _moving_average(self.costs.copy_bytes_per_s, moved_bytes / seconds)
            self.costs = _replace_fields(self.costs, copy_bytes_per_s=rate)

    def record_joint(self, query: str, count: int, seconds: float) -> None:
        """A joint pass of this query and others ran `count` frames in so long."""
        joint = self.costs.joint_of(query)
        if joint is None:
            return
        times = self._passes.setdefault(joint.queries, _RunTimes(joint.cost))
        times.record(count, seconds)
        changed = JointCost(joint.queries, times.correct(joint.cost))
        self.costs = self.costs.with_joint(changed if one is joint else one for one in self.costs.joint)

    def record_run(self, query: str, count: int, seconds: float) -> None:
        """A run of `count` frames took so long."""
        single = self._runs[query].record(count, seconds)
        self.best_s[query] = min(self.best_s.get(query, single), single)
        self._update(query)

    def lower_run_s(self, query: str) -> None:
        """Lower a run time that cost a frame a little: to the best one seen, or into the SLA if even that is above.

        A query believed too slow is not run, and what is not run is not measured: a stall, during the warm-up too,
        must not be for ever. A query that is too slow indeed is tried again from time to time, and publishes late.
        """
        times, sla_s = self._runs[query], self.costs.queries[query].sla_s
        best = self.best_s.get(query, times.mean_s)
        times.lower(best if best <= sla_s else sla_s / 2)
        self._update(query)

    def _update(self, query: str) -> None:
        changed = self._runs[query].correct(self.costs.queries[query])
        self.costs = self.costs.with_query(query, changed)


class _RunTimes:
    """What runs take: the average of one frame, the times of batches over that, and mean deviations by batch size.

    A run of any batch corrects the times of all in proportion, and slowly the proportion of its own. A deviation is a
    fraction of the time; a batch size that has not run yet has that of the last run. A run is expected to take
    DEVIATIONS deviations longer than the average, so that it is in time although times vary, but at most half of what
    is left of the SLA.
    """

    def __init__(self, cost: QueryCost) -> None:
        known = cost.run_s > 0
        self.mean_s = cost.run_s
        self._batches = [one / cost.run_s if known else count for count, one in enumerate(cost.runs_s, 1)]
        self._deviations: list[float | None] = [None] * len(self._batches)
        self._last_deviation = 0.0

    def record(self, count: int, seconds: float) -> float:
        """Learn from a run of `count` frames; returns what one frame took in it, in proportion."""
        single, index, mean_s = seconds / self._batches[count - 1], count - 1, self.mean_s
        if mean_s > 0:
            single = min(single, MAX_TIMES_AVERAGE * mean_s)
            deviation = min(1.0, abs(single - mean_s) / mean_s)  # a stall counts once, in the average
            known = self._deviations[index]
            self._last_deviation = _moving_average(self._last_deviation if known is None else known, deviation)
            self._deviations[index] = self._last_deviation
            if count > 1:
                self._batches[index] = _moving_average(self._batches[index], seconds / mean_s, BATCH_SHARE)
        self.mean_s = _moving_average(mean_s, single)
        return single

    def lower(self, best_s: float) -> None:
        """Move the average of one frame a little towards this time, if that is less, and expect less variation."""
        self.mean_s = _moving_average(self.mean_s, min(self.mean_s, best_s), LOWER_SHARE)
        self._deviations = [None if one is None else (1 - LOWER_SHARE) * one for one in self._deviations]
        self._last_deviation *= 1 - LOWER_SHARE

    def correct(self, cost: QueryCost) -> QueryCost:
        """The cost with the times that runs are expected to take."""
        runs_s = list[float]()
        for batch, own in zip(self._batches, self._deviations, strict=True):
            run_s, deviation = self.mean_s * batch, self._last_deviation if own is None else own
            runs_s.append(run_s + min(DEVIATIONS * deviation * run_s, max(0.0, (cost.sla_s - run_s) / 2)))
        return cost.with_runs_s(runs_s)


def _moving_average(known: float, measured: float, share: float = NEWEST_SHARE) -> float:
    return known + share * (measured - known)


_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", 1):
    _UNITS |= {f"{_letter}B": 1000**_power, f"{_letter}IB": 1024**_power}
MAX_MEMORY_BYTES = 2**60
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_BETWEEN = {"50%": 0.5, "75%": 0.75}


def memory_settings(originals: Costs) -> dict[str, int]:
    """The four named budgets in bytes, from the costs of the ORIGINALS and the same for every arm.

    `min` = the largest query alone (weights + workspace); `all` = all weights + the largest workspace; `50%` and
    `75%` = that far from min to all. Weights count as they are resident (each tensor rounded up to 512 bytes), so
    that at `min` the largest query really fits.
    """
    if not originals.queries:
        raise ValueError("memory settings need at least one query")
    least = max(originals.alone_bytes(query) for query in originals.queries)
    names = frozenset[str]().union(*(cost.needed for cost in originals.queries.values()))
    everything = originals.resident_bytes(names) + max(c.workspace_bytes for c in originals.queries.values())
    between = {name: least + round((everything - least) * share) for name, share in _BETWEEN.items()}
    return {"min": least, **between, "all": everything}


def parse_memory(text: str | int, where: str = "memory", key: str = "", named: str = "") -> int:
    """Bytes of a size: `512MiB` (powers of 1024), `2GB` (powers of 1000), plain bytes; InputError otherwise.

    `named` are the settings that the hint names beside sizes.
    """
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    unit = _UNITS.get(match[2].upper()) if match else None
    hint = f"write {named}a size such as 512MiB, 2GB or a number of bytes"
    if isinstance(text, int) and not isinstance(text, bool):
        nbytes = text
    elif match is None or unit is None:
        raise InputError(where, f"{text!r} is not a size", hint, key)
    else:
        nbytes = int(min(float(match[1]) * unit, MAX_MEMORY_BYTES + 1))
    if not 0 < nbytes <= MAX_MEMORY_BYTES:
        problem = "is more than any memory" if nbytes > 0 else "is not a positive size"
        raise InputError(where, f"{str(text)[:40]!r} {problem}", hint, key)
    return nbytes


def memory_bytes(text: str | int, originals: Costs, where: str = "memory", key: str = "") -> int:
    """Bytes of a named setting (`min`, `50%`, `75%`, `all`) or of a size."""
    settings = memory_settings(originals)
    named = f"{', '.join(settings)} or "
    return settings[text] if isinstance(text, str) and text in settings else parse_memory(text, where, key, named)
