"""The warm-up: every query is loaded and run on a frame of its camera, to learn what loads and runs cost."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from edge_runtime.scheduler import Plan, SchedulerState
from edge_runtime.scheduler.eviction import pick_evictions
from edge_runtime.serving.device import Device

# The first run of a model pays for what is set up once; the best of the others counts.
WARM_UP_RUNS = 3


@dataclass(frozen=True)
class WarmUp:
    """Seconds of a run of one frame by query, the rate of loading (None if nothing was), and what failed."""

    run_s: Mapping[str, float]
    copy_bytes_per_s: float | None
    failed: Mapping[str, Exception]


def warming_up(
    device: Device, plan: Plan, queries: Collection[str], frames: Mapping[str, np.ndarray], clock: Callable[[], float]
) -> Generator[None, None, WarmUp]:
    """Load and run these queries in the plan's order on `frames` (RGB uint8, H, W, 3), a run at a time.

    What others do between two steps may send away what was loaded: it is brought again where that is so.
    """
    moved = seconds = 0.0
    best: dict[str, float] = {}
    failed: dict[str, Exception] = {}
    for query in [query for query in plan.order if query in queries]:
        runs: list[float] = []
        try:
            while len(runs) < WARM_UP_RUNS:
                if not runs or not device.is_resident(query):
                    start, before = clock(), device.arena.bytes_moved
                    _first_load(device, query, plan)
                    seconds += clock() - start
                    moved += device.arena.bytes_moved - before
                runs.append(_timed(device, query, frames[query], clock))
                yield
        except Exception as error:
            failed[query] = error
            continue
        best[query] = min(runs[1:])
    return WarmUp(best, moved / seconds if moved and seconds > 0 else None, failed)


def _first_load(device: Device, query: str, plan: Plan) -> None:
    """A load before anything is known but sizes."""
    held, held_bytes = device.held()
    missing = tuple(piece for piece in device.costs.queries[query].tensors if piece not in held)
    state = SchedulerState(0.0, {}, held, held_bytes)
    now = replace(plan, budget_bytes=device.budget_bytes)  # less, where the device had no memory left
    evict = pick_evictions(state, device.costs, now, query, missing, 1)
    device.load(query, 0, evict or (), bool(missing))


def _timed(device: Device, query: str, image: np.ndarray, clock: Callable[[], float]) -> float:
    start = clock()
    device.run(query, [image])
    return clock() - start
