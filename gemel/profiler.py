"""`gemel profile`: what each query of a bundle costs on this machine, measured and kept beside the bundle."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from edge_runtime.memory.allocator import footprint_bytes
from edge_runtime.scheduler.costs import BATCHES, BatchCost
from edge_runtime.scheduler.sessions import SessionCost
from edge_runtime.simulation.profile_io import (
    JointProfile,
    MeasuredProfile,
    QueryProfile,
    describe_machine,
    monotone_batches,
    profile_path,
    write_profile,
)
from gemel.text import size, table
from merger.events import Progress, Stages, silent
from models.bundle import Bundle, open_bundle
from models.io import check_apart, check_output, hold_locks
from models.sharing.passes import joint_queries

if TYPE_CHECKING:
    import numpy as np

    from edge_runtime.engines.base import FrameEngine
    from edge_runtime.engines.joint_run import JointRunner
    from edge_runtime.memory.arena import Arena
    from models.bundle import Bundle


ROUNDS = 5
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
            "sessions": [
                {"engine": one.engine, "bytes": one.nbytes, "queries": list(one.batches),
                 "run_ms": 1000 * next(iter(one.batches.values()))[0].run_s}
                for one in self.profile.sessions
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
        sessions = [
            f"{', '.join(one.batches)} as one session on {one.engine}: "
            f"{1000 * next(iter(one.batches.values()))[0].run_s:.1f} ms a run, {size(one.nbytes)}, taken where it fits"
            for one in self.profile.sessions
        ]
        return "\n".join([
            table(headers, rows), "", *sessions,
            f"{self.path}: measured on {self.profile.machine['name']} ({self.profile.device}), "
            f"loads at {self.profile.copy_bytes_per_s / 1e9:.2f} GB/s",
        ])  # fmt: skip


def profile_bundle(
    bundle: str | Path, device: str | None = None, factories: Sequence[str] = (), rounds: int = ROUNDS,
    progress: Progress = silent, engine: str = "auto", workload: str | Path | None = None,
) -> ProfileResult:  # fmt: skip
    """Measure every query's load, its runs in batches of 1, 2, 4 and 8, and its workspace; write BUNDLE.profile.json.

    Times are medians over `rounds` of noise frames (FRAME_PIXELS), batches in turns, after one warm-up run each. With
    the bundle's `workload`, the val footage gives the accuracy of results by their age. `device` is cpu or cuda
    (default: cuda if available); `engine` is as in a box config, which uses these costs if it names the same
    engine. Raises InputError for a bad bundle or an unknown engine.
    """
    import torch

    from edge_runtime.engines.registry import AUTO, SESSIONS, check_engine
    from edge_runtime.engines.setup import EngineRequest, choose_engines, common_format, engines_for, layouts_for
    from edge_runtime.memory.arena import Arena
    from edge_runtime.memory.store import Store
    from edge_runtime.memory.transfer import on_compute_stream
    from gemel.evaluation import open_matching_bundle
    from gemel.stream_eval import query_staleness
    from models.workload import load_workload

    check_engine(engine, "gemel profile", "--engine")
    load = None if workload is None else load_workload(workload)
    if load is not None:
        open_matching_bundle(bundle, load)
    check_apart([("", profile_path(bundle))], [("the bundle", bundle)])
    opened, stages = open_bundle(bundle, factories, Path.cwd()), Stages(progress)
    for query in opened.queries:
        opened.check(query.id)
    check_output(profile_path(bundle), overwrite=True)
    with hold_locks(profile_path(bundle)):
        stages.announce([MAKING, MEASURING, *([AGEING] if load else [])])
        stages.begin(MAKING)
        chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
        names = {name for query in opened.queries for name in opened.names_in_order(query.id)}
        fastest = choose_engines(opened, chosen) if engine == AUTO else None
        engines = engines_for(opened, engine, EngineRequest(chosen), fastest)
        store = Store.of_bundle(opened)
        capacity = sum(footprint_bytes(opened.nbytes(name)) for name in names)
        running = engines.values()
        layouts = layouts_for(store.kinds, common_format(running, stays=False))
        arena = Arena(store, capacity, chosen, layouts=layouts)
        queries: dict[str, QueryProfile] = {}
        loads: list[tuple[int, float]] = []
        stages.begin(MEASURING, len(opened.queries))
        try:
            with on_compute_stream(arena.device):  # as a box does
                for query in opened.queries:
                    needed = opened.names_in_order(query.id)
                    found = _loads(arena, needed, rounds)
                    loads += found
                    load_s = median(seconds for _, seconds in found)
                    one = engines[query.id]
                    workspace = {count: one.workspace_of(count) for count in BATCHES}
                    one.bind(arena.tensor)
                    queries[query.id] = QueryProfile(load_s, _batches(one, rounds, workspace), engine=one.name)
                    one.unbind()
                    stages.add()
                joint = _profile_passes(arena, opened, engines, queries, rounds)
        finally:
            arena.close()
        session_engines = tuple(SESSIONS) if engine == AUTO else tuple({engine} & SESSIONS.keys())
        sessions = _measure_sessions(opened, chosen, session_engines, rounds)
        if load is not None:
            stages.begin(AGEING, len(opened.queries))
            for query in load.queries:
                curve = query_staleness(query, opened, chosen)
                queries[query.id] = replace(queries[query.id], staleness=curve)
                stages.add()
        moved, seconds = sum(nbytes for nbytes, _ in loads), sum(took for _, took in loads)
        rate = moved / seconds if seconds > 0 else 1e12
        machine = describe_machine(chosen)
        profile = MeasuredProfile(opened.digest, machine, chosen, engine, rate, 0.0, queries, joint, sessions)
        return ProfileResult(write_profile(bundle, profile), profile)


def _measure_sessions(
    bundle: Bundle, device: str, engines: Sequence[str], rounds: int
) -> tuple[SessionCost, ...]:  # fmt: skip
    """What the sessions of these engines cost, one query measured for all of a session."""
    from edge_runtime.engines.base import EngineError
    from edge_runtime.engines.registry import open_sessions_by

    found = []
    for name in engines:
        try:
            for group in open_sessions_by(name, bundle, [query.id for query in bundle.queries], device):
                first = next(iter(group.values()))
                batches = _batches(first, rounds, {count: first.workspace_of(count) for count in BATCHES})
                nbytes = first.shared.nbytes if first.shared else 0
                found.append(SessionCost(name, nbytes, dict.fromkeys(group, batches)))
        except EngineError as error:
            log.info("engine %s: no session: %s", name, error)
    return tuple(found)


def _loads(arena: Arena, needed: Sequence[str], rounds: int) -> list[tuple[int, float]]:
    """(bytes, seconds) of loads of all these tensors into an arena that holds nothing of them."""
    found = []
    for _ in range(rounds):
        arena.change(tuple(arena.residency.resident), ())
        start = time.perf_counter()
        moved = arena.change((), needed)
        found.append((moved, time.perf_counter() - start))
    return found


def _profile_passes(
    arena: Arena, bundle: Bundle, engines: Mapping[str, FrameEngine], queries: Mapping[str, QueryProfile], rounds: int
) -> tuple[JointProfile, ...]:
    """The passes that serve several queries with the outputs of separate runs, and what they cost."""
    from edge_runtime.engines.joint_run import JointRunner, runs_jointly

    found = []
    for alike in joint_queries(bundle.queries, bundle.nbytes):
        own = {query: engines[query] for query in alike}
        if not runs_jointly(list(own.values())):
            continue
        arena.change((), tuple(dict.fromkeys(name for query in alike for name in bundle.names_in_order(query))))
        for engine in own.values():
            engine.bind(arena.tensor)
        runner = JointRunner(own)
        pictures = {query: _frames(engine, 1)[0] for query, engine in own.items()}
        if runner.differs(pictures) is None:
            batches = _joint_batches(runner, own, rounds)
            found.append(JointProfile(alike, (queries[alike[0]].batches[0], *batches)))
        for engine in own.values():
            engine.unbind()
    return tuple(found)


def _joint_batches(
    runner: JointRunner, engines: Mapping[str, FrameEngine], rounds: int
) -> Iterator[BatchCost]:  # fmt: skip
    """Batches of two frames or more, which the queries take in turns; those with one view take the same frames."""
    import torch

    from edge_runtime.engines.base import peak_bytes

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
    import torch

    from edge_runtime.engines.base import peak_bytes

    frames = _frames(engine, BATCHES[-1])
    seconds: dict[int, list[float]] = {count: [] for count in BATCHES}
    for round_index in range(rounds + 1):
        for count in BATCHES:
            start = time.perf_counter()
            engine.run(frames[:count])
            if engine.device.type == "cuda":
                torch.cuda.synchronize()
            if round_index:
                seconds[count].append(time.perf_counter() - start)
    for count in BATCHES:
        seen = peak_bytes(partial(engine.run, frames[:count]), engine.device)
        workspace[count] = max(workspace[count], seen)
    return monotone_batches(BatchCost(count, median(seconds[count]), workspace[count]) for count in BATCHES)


def _frames(engine: FrameEngine, count: int) -> list[np.ndarray]:
    """Noise frames of a camera's size, at least as large as the query's region."""
    import numpy as np

    width, height = map(max, FRAME_PIXELS, engine.query.region.least_frame())
    return list(np.random.default_rng(0).integers(0, 256, (count, height, width, 3), np.uint8))
