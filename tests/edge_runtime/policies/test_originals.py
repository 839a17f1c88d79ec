"""The originals' pace: no frame is answered later than it would be with nothing shared."""

from __future__ import annotations

import random

import pytest

from edge_runtime.policies import POLICIES
from edge_runtime.policies.against.originals import AsOriginals
from edge_runtime.rehearsal.simulator import Simulation, simulate
from edge_runtime.schedule import Demand
from edge_runtime.schedule.costs import Costs, QueryCost
from edge_runtime.schedule.settings import memory_settings

MB = 1_000_000


def drawn(seed: int) -> tuple[Costs, dict[str, Demand], dict[str, list[float]]]:
    """Three to six queries of private and shared tensors that take a good part of the device, and their frames."""
    draw = random.Random(seed)
    sizes = {f"t{index}": draw.randint(1, 30) * MB for index in range(8)}
    queries, demands, frames = {}, {}, {}
    for index in range(draw.randint(3, 6)):
        query = f"q{index}"
        tensors = draw.sample(sorted(sizes), draw.randint(2, 5))
        run_s, fps = draw.uniform(0.005, 0.15), draw.choice([2.0, 5.0, 10.0, 30.0])
        queries[query] = QueryCost(tuple(tensors), run_s, draw.randint(0, 9) * MB, draw.choice([0.1, 0.2, 0.5]))
        demands[query] = Demand(fps)
        jitter = draw.choice([0.0, 0.3]) / fps
        frames[query] = sorted((place + draw.random() * jitter + 0.013 * index) / fps for place in range(int(12 * fps)))
    used = {name for cost in queries.values() for name in cost.tensors}
    costs = Costs(queries, {name: size for name, size in sizes.items() if name in used}, 3e8, 0.001)
    return costs, demands, frames


def finished(played: Simulation) -> dict[tuple[str, float], float]:
    """When each frame that was answered in time was."""
    return {
        (one.query, one.captured_at): one.finished_at
        for one in played.frames
        if one.finished_at is not None and not one.late
    }


@pytest.mark.parametrize("setting", ["min", "50%", "75%"])
def test_every_frame_of_the_originals_is_answered_and_none_later(setting):
    sooner = 0
    for seed in range(25):
        costs, demands, frames = drawn(seed)
        budget = memory_settings(POLICIES["time-sharing"].view(costs))[setting]
        theirs = finished(simulate(costs, frames, budget, POLICIES["time-sharing"], demands))
        played = simulate(costs, frames, budget, AsOriginals(), demands)
        ours = finished(played)
        assert played.max_used_bytes <= budget and theirs
        late = {frame: (ours.get(frame), at) for frame, at in theirs.items() if ours.get(frame, 1e9) > at + 1e-6}
        assert not late, f"workload {seed}"
        sooner += sum(ours[frame] < at - 1e-6 for frame, at in theirs.items())
    assert sooner > 100
