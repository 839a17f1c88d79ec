"""Layer streaming: no weight of a query has to stay; while one slice of a model runs, the next ones are copied.

Demand Layering (Ji et al., RTSS 2022) runs a model larger than its memory layer by layer, FlexNN (Li et al., MobiCom
2024) also cuts large layers into slices and keeps some in memory for good. Here both, for many models beside each other
and kindly: cuts cost nothing, the window that the slices take turns in has no gaps, a run opens one copy. What is left
of the budget beside the window keeps those slices for good whose copies would delay most runs.

How a run is spread over a model's layers, on paper: what streaming layer by layer is reckoned from.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gemel.edge_runtime.scheduler.costs import BatchCost, Costs, JointCost, QueryCost
from gemel.edge_runtime.scheduler.eviction import MIN_OVERFLOW_BYTES
from gemel.edge_runtime.scheduler.types import QuerySpec
from gemel.edge_runtime.simulation.device_profiles import DeviceProfile, overflow_layers

if TYPE_CHECKING:
    from gemel.models.bundle import Bundle, BundleQuery


SLICES = 160
"""A tensor larger than this part of all bytes is cut."""
WINDOWS = (0.1, 0.3)
"""Parts of the budget that are tried as the window: a larger one hides more copies, and leaves less for what stays."""
URGENT = (1.0, 4.0)
"""How much more a second saved counts, as long as a run takes longer than its SLA: tried, too."""


@dataclass(frozen=True, slots=True)
class StreamedLayer:
    """What is called once its `tensors` are there: `share` of a run, copied anew `times` in it."""

    tensors: tuple[str, ...]
    share: float
    times: int = 1


@dataclass(frozen=True, slots=True)
class StreamedSlice:
    """A tensor or a part of one, the bytes a run copies unless it is `kept`, and its share of the run."""

    name: str
    copied_bytes: int
    share: float


@dataclass(frozen=True)
class StreamedCosts:
    """The costs of streaming within a budget, and the bytes that each query copies in a run.

    `costs` need only what is kept; `lacking` are the queries whose window and intermediates exceed the budget.
    """

    costs: Costs
    run_bytes: Mapping[str, int]


def pipelined_s(slices: Iterable[tuple[int, float]], bytes_per_s: float, window_bytes: int) -> float:
    """Seconds of a run whose slices (bytes to copy, seconds to run) are copied in order through a window.

    Copies go on while earlier slices run, as far as the window has room; a slice leaves it once it has run.
    """
    copied_s = ran_s = 0.0
    used, held = 0, deque[tuple[int, float]]()
    for nbytes, run_s in slices:
        if nbytes:
            while held and used + nbytes > window_bytes:
                freed, at_s = held.popleft()
                used -= freed
                copied_s = max(copied_s, at_s)
            copied_s += nbytes / bytes_per_s
            ran_s = max(ran_s, copied_s)
            held.append((nbytes, ran_s + run_s))
            used += nbytes
        ran_s += run_s
    return ran_s


def stream_costs(
    costs: Costs, demands: Mapping[str, QuerySpec], budget_bytes: int, layers: Mapping[str, Sequence[StreamedLayer]],
    window_share: float = WINDOWS[0], urgent: float = URGENT[0],
) -> StreamedCosts:  # fmt: skip
    """The costs where every query streams what is not kept; slices that several queries need are kept once for all.

    Where everything fits, everything is kept.
    """
    stream = _Stream(costs, demands, budget_bytes, layers, window_share)
    stream.keep(urgent)
    return stream.costs()


class _Stream:
    """What is kept so far, and what runs take with it."""

    def __init__(
        self, costs: Costs, demands: Mapping[str, QuerySpec], budget_bytes: int,
        layers: Mapping[str, Sequence[StreamedLayer]],
        window_share: float,
    ) -> None:  # fmt: skip
        self._whole, self._demands = costs, demands
        limit = max(1, sum(costs.tensor_bytes.values()) // SLICES)
        parts = {name: _cut(name, nbytes, limit) for name, nbytes in costs.tensor_bytes.items()}
        self._bytes = dict(part for cut in parts.values() for part in cut)
        self._slices = {query: _slices(layers[query], parts, cost.needed) for query, cost in costs.queries.items()}
        self._users: dict[str, list[str]] = {}
        for query, slices in self._slices.items():
            for name in dict.fromkeys(one.name for one in slices):
                self._users.setdefault(name, []).append(query)
        workspace = max(cost.workspace_bytes for cost in costs.queries.values())
        free = max(0, budget_bytes - workspace)
        self._window = max(round(window_share * free), 2 * limit)
        whole = costs.resident_bytes(costs.tensor_bytes.keys())
        self._window = 0 if whole <= free else self._window
        self._room = free - self._window
        self._kept: set[str] = set()
        for name, nbytes in sorted(self._bytes.items(), key=lambda part: part[1]):
            if self._window and nbytes >= MIN_OVERFLOW_BYTES:
                break
            self._take(name)
        self._runs = {query: join_copies(slices, self._kept) for query, slices in self._slices.items()}
        self._passes = [_slices(_joint_layers(one, layers), parts, frozenset()) for one in costs.joint]

    def keep(self, urgent: float) -> None:
        """Keep, for as long as there is room and it brings anything, what saves most seconds for its bytes."""
        if not self._window:
            return
        runs_s = {query: self._run_s(query) for query in self._slices}
        offers = {query: self._offer(query, runs_s, urgent) for query in self._slices}
        while True:
            gain, name, query = max(offers.values(), default=(0.0, "", ""))
            if gain <= 0:
                return
            self._take(name)
            changed = self._users[name]
            for one in changed:
                runs_s[one] = self._run_s(one)
            for one, (_, offered, _) in offers.items():
                if one in changed or offered == name or one == query or self._bytes.get(offered, 0) > self._room:
                    offers[one] = self._offer(one, runs_s, urgent)

    def costs(self) -> StreamedCosts:
        """As it stands."""
        queries, run_bytes = {}, {}
        for query, cost in self._whole.queries.items():
            larger = tuple(
                BatchCost(one.count, self._run_s(query, one.count), one.workspace_bytes + self._window)
                for one in cost.larger
            )
            names = tuple(dict.fromkeys(one.name for one in self._slices[query] if one.name in self._kept))
            first_s = self._run_s(query)
            queries[query] = QueryCost(names, first_s, cost.workspace_bytes + self._window, cost.sla_s, larger)
            run_bytes[query] = sum(one.copied_bytes for one in self._slices[query] if one.name not in self._kept)
        kept = {name: nbytes for name, nbytes in self._bytes.items() if name in self._kept}
        whole = self._whole
        joint = tuple(self._joint(one, slices) for one, slices in zip(whole.joint, self._passes, strict=True))
        # A cut tensor begins at no address of its own: only whole ones are rounded up.
        within = Costs(queries, kept, whole.copy_bytes_per_s, whole.load_latency_s, dict(kept), joint)
        return StreamedCosts(within, run_bytes)

    def _joint(self, joint: JointCost, slices: Sequence[StreamedSlice]) -> JointCost:
        """A pass copies what is tied once, and the private slices of all its queries."""
        batches = (
            BatchCost(
                count,
                self._pipelined_s(slices, joint.cost.run_of(count)),
                joint.cost.workspace_of(count) + self._window,
            )
            for count in (1, *(one.count for one in joint.cost.larger))
        )
        return JointCost(joint.queries, QueryCost.of_batches((), joint.cost.sla_s, batches))

    def _take(self, name: str) -> None:
        self._kept.add(name)
        self._room -= self._bytes[name]

    def _run_s(self, query: str, count: int = 1, kept: str = "") -> float:
        return self._pipelined_s(self._runs[query], self._whole.queries[query].run_of(count), kept)

    def _pipelined_s(self, slices: Iterable[StreamedSlice], run_s: float, kept: str = "") -> float:
        held = self._kept
        steps = [(0 if one.name in held or one.name == kept else one.copied_bytes, one.share * run_s) for one in slices]
        copies = any(nbytes for nbytes, _ in steps)
        latency_s = self._whole.load_latency_s if copies else 0.0
        return latency_s + pipelined_s(steps, self._whole.copy_bytes_per_s, self._window)

    def _offer(self, query: str, runs_s: Mapping[str, float], urgent: float) -> tuple[float, str, str]:
        """Of the query's first slice that is copied and the largest: seconds saved for each byte kept, and which."""
        left = [one for one in self._runs[query] if one.name not in self._kept and self._bytes[one.name] <= self._room]
        if not left or self._whole.queries[query].run_s > self._whole.queries[query].sla_s:
            return 0.0, "", query
        best = (0.0, "", query)
        for one in {left[0], left[-1], max(left, key=lambda one: one.copied_bytes)}:
            saved = 0.0
            for user in self._users[one.name]:
                cost = self._whole.queries[user]
                if cost.run_s <= cost.sla_s:
                    weight = self._demands[user].fps * (urgent if runs_s[user] > cost.sla_s else 1.0)
                    saved += weight * (runs_s[user] - self._run_s(user, kept=one.name))
            best = max(best, (saved / self._bytes[one.name], one.name, query))
        return best


def join_copies(slices: Iterable[StreamedSlice], kept: Set[str]) -> tuple[StreamedSlice, ...]:
    """The same run with what is kept between two copies as one slice."""
    found: list[StreamedSlice] = []
    for one in slices:
        if found and one.name in kept and found[-1].name in kept:
            found[-1] = StreamedSlice(one.name, 0, found[-1].share + one.share)
        else:
            found.append(one)
    return tuple(found)


def _joint_layers(joint: JointCost, layers: Mapping[str, Sequence[StreamedLayer]]) -> list[StreamedLayer]:
    """The layers of a pass: each with the tensors of all its queries."""
    return [
        StreamedLayer(
            tuple(dict.fromkeys(name for one in alike for name in one.tensors)), alike[0].share, alike[0].times
        )
        for alike in zip(*(layers[query] for query in joint.queries), strict=True)
    ]


def _cut(name: str, nbytes: int, limit: int) -> list[tuple[str, int]]:
    """A tensor's parts of at most `limit` bytes."""
    count = -(-nbytes // limit)
    if count <= 1:
        return [(name, nbytes)]
    return [(f"{name}#{index}", nbytes * (index + 1) // count - nbytes * index // count) for index in range(count)]


def _slices(
    layers: Sequence[StreamedLayer], parts: Mapping[str, Sequence[tuple[str, int]]], needed: frozenset[str]
) -> tuple[StreamedSlice, ...]:
    """The slices of a query in the order of its run; a layer's share of the run is spread over them by bytes."""
    found, seen = [], set[str]()
    for layer in layers:
        cuts = [part for name in layer.tensors for part in parts[name]]
        total = sum(nbytes for _, nbytes in cuts)
        for name, nbytes in cuts:
            found.append(StreamedSlice(name, nbytes * layer.times, layer.share * nbytes / total if total else 0.0))
            seen.add(name.partition("#")[0])
    lacking = needed - seen
    if lacking:
        raise ValueError(f"no layer uses {sorted(lacking)[:3]}")
    return tuple(found)


def streamed_layers(profile: DeviceProfile, bundle: Bundle) -> dict[str, tuple[StreamedLayer, ...]]:
    """The layers of a bundle's queries in the order of their modules, for a device.

    A layer's share of a run follows from its operations and one call; what functions without weights compute is spread
    over all.
    """
    return {query.id: _layers(profile, bundle, query) for query in bundle.queries}


def _layers(profile: DeviceProfile, bundle: Bundle, query: BundleQuery) -> tuple[StreamedLayer, ...]:
    found = count_frames(bundle, query)
    seconds = [one["flops"] / profile.flops_per_s + profile.launch_s for one in found]
    names, total_s = query.tensors, sum(seconds)
    return tuple(
        StreamedLayer(tuple(dict.fromkeys(names[key] for key in one["keys"])), own_s / total_s, one["times"])
        for one, own_s in zip(found, seconds, strict=True)
    )


def count_frames(bundle: Bundle, query: BundleQuery) -> list[dict[str, Any]]:
    """State dict keys, operations and fills of each layer."""
    flops = _flops_by_module(bundle, query)
    return [
        {"keys": [part.key for part in layer.parts], "flops": flops.get(layer.path, 0), "times": layer.times}
        for layer in overflow_layers(bundle, query)
    ]


def _flops_by_module(bundle: Bundle, query: BundleQuery) -> dict[str, int]:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from gemel.models.preprocess import height_width

    model, size = bundle.build(query.id, "meta").eval(), height_width(query.input_size)
    with torch.inference_mode(False), torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.empty(1, 3, *size, device="meta"))
    return {path.partition(".")[2]: sum(ops.values()) for path, ops in counter.get_flop_counts().items()}
