"""`gemel profile`: what each query of a bundle costs on this machine, measured and kept beside the bundle."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from gemel.edge_runtime.memory.allocator import footprint_bytes
from gemel.edge_runtime.scheduler.costs import BATCHES, BatchCost
from gemel.edge_runtime.simulation.profile_io import (
    JointProfile,
    MeasuredProfile,
    QueryProfile,
    describe_machine,
    monotone_batches,
    profile_path,
    write_profile,
)
from gemel.models.bundle import Bundle, open_bundle
from gemel.models.files.extras import has_cuda
from gemel.models.files.io import check_apart, check_output, hold_locks
from gemel.models.sharing.passes import joint_queries
from gemel.models.stages import Progress, Stages, silent
from gemel.text import size, table

if TYPE_CHECKING:
    import numpy as np

    from gemel.edge_runtime.engines.base import FrameEngine
    from gemel.edge_runtime.engines.joint_run import JointRunner
    from gemel.models.bundle import Bundle
    from gemel.models.workload import Workload


ROUNDS, MIN_S = 5, 1e-9
MAKING, MEASURING = "make the engines", "measure each query's loads and runs"
AGEING = "measure accuracy by age of the result"
FRAME_PIXELS = (1280, 720)

log = logging.getLogger("gemel.profile")


@dataclass(frozen=True)
class ProfileResult:
    """A bundle's measured profile, and the file it was written to."""

    path: Path
    profile: MeasuredProfile

    def to_json(self) -> dict[str, Any]:
        return {
            "profile": str(self.path),
            "device": self.profile.device,
            "machine": dict(self.profile.machine),
            "engine": self.profile.engine,
            "copy_gb_s": self.profile.copy_bytes_per_s / 1e9,
            "queries": [
                {"id": query, "engine": one.engine, "load_ms": 1000 * one.load_s,
                 "batches": [{"count": batch.count, "run_ms": 1000 * batch.run_s,
                              "workspace_bytes": batch.workspace_bytes} for batch in one.batches],
                 "staleness": list(one.staleness)}
                for query, one in self.profile.queries.items()
            ],
            "joint": [
                {"queries": list(one.queries),
                 "batches": [{"count": batch.count, "run_ms": 1000 * batch.run_s,
                              "workspace_bytes": batch.workspace_bytes} for batch in one.batches]}
                for one in self.profile.joint
            ],
        }  # fmt: skip

    def to_text(self) -> str:
        rows = [
            (query, one.engine, f"{1000 * one.load_s:.2f} ms",
             *(f"{1000 * batch.run_s:.1f} ms" for batch in one.batches), size(one.batches[0].workspace_bytes))
            for query, one in self.profile.queries.items()
        ]  # fmt: skip
        for one in self.profile.joint:
            name = f"one pass for {', '.join(one.queries)}"
            rows.append((name, "", "", *(f"{1000 * batch.run_s:.1f} ms" for batch in one.batches),
                         size(one.batches[1].workspace_bytes)))  # fmt: skip
        headers = ("query", "engine", "load", *(f"run of {count}" for count in BATCHES), "workspace")
        return "\n".join([
            table(headers, rows), "",
            f"{self.path}: measured on {self.profile.machine['name']} ({self.profile.device}), "
            f"loads at {self.profile.copy_bytes_per_s / 1e9:.2f} GB/s",
        ])  # fmt: skip

    __repr__ = to_text


def profile_bundle(
    bundle: str | Path, device: str | None = None, factories: Sequence[str] = (), rounds: int = ROUNDS,
    progress: Progress = silent, engine: str = "auto", workload: str | Path | None = None,
) -> ProfileResult:  # fmt: skip
    """Measure every query's load, its runs in batches of 1, 2, 4 and 8, and its workspace; write BUNDLE.profile.json.

    Times are medians over `rounds` of noise frames (FRAME_PIXELS), batches in turns, after one warm-up run each; runs
    of networks that differ in their weights alone are measured once. With the bundle's `workload`, the val footage
    gives the accuracy of results by their age. `device` is cpu or cuda (default: cuda if available); `engine` is as in
    a box config, which uses these costs if it names the same engine. Raises InputError for a bad bundle or an unknown
    engine.
    """
    from gemel.edge_runtime.engines.base import AUTO, ENGINES
    from gemel.edge_runtime.engines.setup import EngineRequest, engines_for

    ENGINES.check(engine, "gemel profile", "--engine", [AUTO])
    load = None if workload is None else _load_workload(bundle, workload)
    check_apart([("", profile_path(bundle))], [("the bundle", bundle)])
    opened, stages = open_bundle(bundle, factories, Path.cwd()), Stages(progress)
    for query in opened.queries:
        opened.check(query.id)
    check_output(profile_path(bundle), overwrite=True)
    with hold_locks(profile_path(bundle)):
        stages.announce([MAKING, MEASURING, *([AGEING] if load else [])])
        stages.begin(MAKING)
        chosen = device or ("cuda" if has_cuda() else "cpu")
        engines = engines_for(opened, engine, EngineRequest(chosen))
        memory = _open_memory(opened, engines, chosen)
        queries: dict[str, QueryProfile] = {}
        loads: list[tuple[int, float]] = []
        first_alike = {query: _first_alike(engine, engines) for query, engine in engines.items()}
        try:
            with memory.computing():  # as a box does
                shares = {query: _run_seconds(memory, engines[query]) for query in dict.fromkeys(first_alike.values())}
                passes = _joint_passes(opened, engines)
                whole = sum(shares.values()) + sum(shares[first_alike[members[0]]] for members in passes)
                stages.begin(MEASURING, whole)
                for query, one in engines.items():
                    found = _loads(memory, tuple(one.weights), rounds)
                    loads += found
                    load_s = median(seconds for _, seconds in found)
                    workspace = {count: one.workspace_of(count) for count in BATCHES}
                    pages = tuple(one.weights) if one.in_pages else ()
                    if first_alike[query] == query:
                        memory.bind(one, tuple(one.weights))
                        batches = _batches(one, rounds, workspace)
                        memory.unbind(one)
                        stages.add(shares[query])
                    else:
                        batches = queries[first_alike[query]].batches
                    queries[query] = QueryProfile(load_s, batches, engine=one.name, pages=pages)
                joint = list[JointProfile]()
                for members in passes:
                    joint += _profile_pass(memory, opened, {name: engines[name] for name in members}, queries, rounds)
                    stages.add(shares[first_alike[members[0]]])
        finally:
            memory.close()
        if load is not None:
            stages.begin(AGEING, sum(shares[first] for first in first_alike.values()))
            for query in load.queries:
                from gemel.stream_eval import query_staleness

                curve = query_staleness(query, opened, chosen)
                queries[query.id] = replace(queries[query.id], staleness=curve)
                stages.add(shares[first_alike[query.id]])
        moved, seconds = sum(nbytes for nbytes, _ in loads), sum(took for _, took in loads)
        rate = moved / seconds if seconds > 0 else 1e12
        machine = describe_machine(chosen)
        ranges = {name: nbytes for one in engines.values() if one.in_pages for name, nbytes in one.weights.items()}
        profile = MeasuredProfile(opened.digest, machine, chosen, engine, rate, 0.0, queries, tuple(joint), ranges)
        return ProfileResult(write_profile(bundle, profile), profile)


def _load_workload(bundle: str | Path, workload: str | Path) -> Workload:
    """The workload that the bundle was merged from; InputError for another one."""
    from gemel.evaluation import open_matching_bundle
    from gemel.models.workload import load_workload

    load = load_workload(workload)
    open_matching_bundle(bundle, load)
    return load


def _open_memory(bundle: Bundle, engines: Mapping[str, FrameEngine], device: str) -> Any:
    """Memory for the weights of all these engines, as a box has it whose weights come and go."""
    from gemel.edge_runtime.engines.setup import are_paged
    from gemel.edge_runtime.memory.page_memory import open_memory

    sizes = {name: nbytes for engine in engines.values() for name, nbytes in engine.weights.items()}
    capacity = sum(map(footprint_bytes, sizes.values()))
    if are_paged(engines.values()):
        from gemel.edge_runtime.engines.mapped import page_store

        return open_memory(page_store(engines, sizes), capacity, device)
    from gemel.edge_runtime.engines.layouts import common_format, layouts_for
    from gemel.edge_runtime.memory.store import Store

    store = Store.of_bundle(bundle)
    layouts = layouts_for(store.kinds, common_format(engines.values(), stays=False))
    return open_memory(store, capacity, device, layouts=layouts)


def _loads(arena: Any, needed: Sequence[str], rounds: int) -> list[tuple[int, float]]:
    """(bytes, seconds) of loads of all these tensors into an arena that holds nothing of them."""
    found = []
    for _ in range(rounds):
        arena.change(tuple(arena.residency.resident), ())
        start = time.perf_counter()
        moved = arena.change((), needed)
        found.append((moved, time.perf_counter() - start))
    return found


def _first_alike(engine: FrameEngine, engines: Mapping[str, FrameEngine]) -> str:
    """The first query whose runs take as long, since its network differs in its weights alone."""
    from gemel.edge_runtime.life.runtime import architecture_of

    kind = engine.name, architecture_of(engine.query)
    return next(query for query, other in engines.items() if (other.name, architecture_of(other.query)) == kind)


def _run_seconds(memory: Any, engine: FrameEngine) -> float:
    """Seconds of the second run of a frame, by which the time of all measurements is shared out beforehand."""
    memory.change((), tuple(engine.weights))
    memory.bind(engine, tuple(engine.weights))
    frames, wait = _frames(engine, 1), _device_wait(engine)
    for _ in range(2):
        start = time.perf_counter()
        engine.run(frames)
        wait()
    memory.unbind(engine)
    return max(time.perf_counter() - start, MIN_S)


def _joint_passes(bundle: Bundle, engines: Mapping[str, FrameEngine]) -> list[tuple[str, ...]]:
    """The queries of each pass that these engines have."""
    from gemel.edge_runtime.engines.base import runs_jointly

    groups = joint_queries(bundle.queries, bundle.nbytes)
    return [tuple(members) for members in groups if runs_jointly([engines[query] for query in members])]


def _profile_pass(
    arena: Any, bundle: Bundle, own: Mapping[str, FrameEngine], queries: Mapping[str, QueryProfile], rounds: int
) -> Iterator[JointProfile]:
    """What the pass of these queries costs; nothing where its outputs are not those of separate runs."""
    from gemel.edge_runtime.engines.joint_run import JointRunner

    arena.change((), tuple(dict.fromkeys(name for query in own for name in bundle.names_in_order(query))))
    for engine in own.values():
        engine.bind(arena.tensor)
    runner = JointRunner(own)  # type: ignore[arg-type]  # all are in torch
    pictures = {query: _frames(engine, 1)[0] for query, engine in own.items()}
    if runner.differs(pictures) is None:
        first = queries[next(iter(own))].batches[0]
        yield JointProfile(tuple(own), (first, *_joint_batches(runner, own, rounds)))
    for engine in own.values():
        engine.unbind()


def _joint_batches(
    runner: JointRunner, engines: Mapping[str, FrameEngine], rounds: int
) -> Iterator[BatchCost]:  # fmt: skip
    """Batches of two frames or more, which the queries take in turns; those with one view take the same frames."""
    import torch

    from gemel.edge_runtime.engines.tensor_engine import peak_bytes

    device = next(iter(engines.values())).device
    views: dict[object, list[np.ndarray]] = {}
    frames = {
        query: views.setdefault(engine.query.view, _frames(engine, BATCHES[-1])) for query, engine in engines.items()
    }
    for count in BATCHES[1:]:
        taken: dict[str, list[np.ndarray]] = {}
        for _, query in zip(range(count), cycle(engines)):
            own = taken.setdefault(query, [])
            own.append(frames[query][len(own)])
        seconds = []
        for _ in range(rounds + 1):
            start = time.perf_counter()
            runner.run(taken)
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        workspace = peak_bytes(partial(runner.run, taken), device)
        yield BatchCost(count, median(seconds[1:]), workspace)


def _batches(engine: FrameEngine, rounds: int, workspace: dict[int, int]) -> tuple[BatchCost, ...]:
    """Each batch's time and workspace, frame preparation included, as a box spends it.

    `workspace` is what the engine knows of it; what torch's allocator sees takes its place where it is more.
    """
    frames = _frames(engine, BATCHES[-1])
    seconds: dict[int, list[float]] = {count: [] for count in BATCHES}
    wait = _device_wait(engine)
    for round_index in range(rounds + 1):
        for count in BATCHES:
            start = time.perf_counter()
            engine.run(frames[:count])
            wait()
            if round_index:
                seconds[count].append(time.perf_counter() - start)
    if not engine.in_pages:
        from gemel.edge_runtime.engines.tensor_engine import peak_bytes

        for count in BATCHES:
            workspace[count] = max(workspace[count], peak_bytes(partial(engine.run, frames[:count]), engine.device))
    return monotone_batches(BatchCost(count, median(seconds[count]), workspace[count]) for count in BATCHES)


def _device_wait(engine: FrameEngine) -> Callable[[], object]:
    """Waits for what was queued on the engine's device."""
    if engine.in_pages or engine.device.type != "cuda":
        return lambda: None
    import torch

    return torch.cuda.synchronize


def _frames(engine: FrameEngine, count: int) -> list[np.ndarray]:
    """Noise frames of a camera's size, at least as large as the query's region."""
    import numpy as np

    width, height = map(max, FRAME_PIXELS, engine.query.region.least_frame())
    return list(np.random.default_rng(0).integers(0, 256, (count, height, width, 3), np.uint8))
