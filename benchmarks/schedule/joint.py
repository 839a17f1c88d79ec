"""One pass for all that share, against streaming and against the same merge without it, on modelled devices.

Usage: python -m benchmarks.schedule.joint --json FILE [--seconds S] [--workers N] [--devices NAME ...]

Every workload of the catalogue with memory for 10, 25, 50 and 100 % of the originals' weights and the largest
workspace beside them. Batch costs are modelled from FLOPs and calls of modules (`device_profiles.costs_for`), not
measured. Arms, each under the better of the paper's turns and the adaptive schedule:

- streamed: the originals streamed layer by layer, the best of the windows of `benchmarks/schedule/streamed.py`
- merged: at the ceiling, swapped
- one pass: the same, queries of one architecture in one pass

Goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.schedule.cases import WORKLOADS, arrivals_of, catalogue, markdown
from benchmarks.schedule.playing import Row, code_of, play
from benchmarks.schedule.rivals import OURS, THEIRS, best, best_streamed, costs_to_swap, frames_and_bytes
from benchmarks.schedule.streamed import stream_costs, streamed_layers
from edge_runtime.policies import POLICIES
from edge_runtime.scheduler import QuerySpec
from edge_runtime.scheduler.costs import Costs
from edge_runtime.simulation.device_profiles import PROFILES, costs_for
from edge_runtime.simulation.simulator import Simulation, simulate
from gemel.analytic_costs import merge_at_ceiling, workload_originals
from gemel.planner import DEFAULT_FPS
from models.workload import load_workload

SHARES = (0.1, 0.25, 0.5, 1.0)
STREAMED, MERGED, ONE_PASS = ARMS = ("streamed", "merged", "one pass")
DEVICES = ("jetson-nano", "orin-nano-8gb")
HEADS = ("memory", "device", "cases", "frames", *ARMS, "one pass / streamed", "one pass / merged",
         "cases below streamed", "least query, one pass / merged")  # fmt: skip
SHARING = ("high", "medium", "low")
MIN_FRAMES = 20
"""A query with fewer frames in time says nothing of a ratio."""


def rows_of(workload: str, device: str, seconds: str) -> list[Row]:
    """A row for each budget of one workload on one device."""
    queries, profile = load_workload(WORKLOADS / f"{workload}.yaml").queries, PROFILES[device]
    specs = {query.id: QuerySpec(query.fps or DEFAULT_FPS, float(query.priority)) for query in queries}
    arrivals = arrivals_of(specs, float(seconds), 0)
    originals, shared = workload_originals(queries), merge_at_ceiling(queries)
    whole, merged, layers = (
        costs_for(profile, originals),
        costs_for(profile, shared),
        streamed_layers(profile, originals),
    )
    weights = whole.resident_bytes(whole.tensor_bytes.keys())
    workspace = max(cost.workspace_bytes for cost in whole.queries.values())
    rows = []
    for share in SHARES:
        budget = round(share * weights) + workspace

        def play_policy(of: Costs, policy: str, budget: int = budget) -> Simulation:
            return simulate(of, arrivals, budget, POLICIES[policy], specs)

        swapped, copied = costs_to_swap(merged, shared, budget)
        arms = {
            STREAMED: best_streamed(
                lambda *how, budget=budget: stream_costs(whole, specs, budget, layers, *how), play_policy
            ),
            MERGED: best(
                (policy, frames_and_bytes(play_policy(swapped.with_joint(()), policy), copied))
                for policy in (THEIRS, OURS)
            ),
            ONE_PASS: best(
                (policy, frames_and_bytes(play_policy(swapped, policy), copied)) for policy in (THEIRS, OURS)
            ),
        }
        rows.append({
            "workload": workload, "device": device, "share": share, "received": sum(map(len, arrivals.values())),
            "joint": [list(one.queries) for one in merged.joint], "arms": arms,
        })  # fmt: skip
    return rows


def table(rows: Sequence[Row]) -> list[tuple[object, ...]]:
    """A row of HEADS for each budget and device."""
    found = []
    for share in SHARES:
        for device in dict.fromkeys(row["device"] for row in rows):
            chosen = [row for row in rows if (row["share"], row["device"]) == (share, device)]
            sums = {arm: sum(row["arms"][arm]["in_time"] for row in chosen) for arm in ARMS}
            pairs = [
                (after, before) for row in chosen
                for after, before in zip(row["arms"][ONE_PASS]["by_query"], row["arms"][MERGED]["by_query"])
                if before >= MIN_FRAMES
            ]  # fmt: skip
            least = min((after / before for after, before in pairs), default=1.0)
            below = sum(row["arms"][ONE_PASS]["in_time"] < row["arms"][STREAMED]["in_time"] for row in chosen)
            found.append((
                f"{100 * share:g} %", device, len(chosen), sum(row["received"] for row in chosen), *sums.values(),
                f"{sums[ONE_PASS] / max(1, sums[STREAMED]):.2f}", f"{sums[ONE_PASS] / max(1, sums[MERGED]):.2f}",
                f"{below} of {len(chosen)}",
                f"{least:.2f} ({sum(after < 0.95 * before for after, before in pairs)} of {len(pairs)} below 0.95)",
            ))  # fmt: skip
    return found


def main(arguments: list[str] | None = None) -> int:
    """The command; 130 where it was interrupted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="where to keep what was played")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each play; 30 unless given")
    parser.add_argument("--workers", type=int, help="processes; one for each core unless given")
    parser.add_argument("--devices", nargs="+", choices=PROFILES, default=DEVICES)
    given = parser.parse_args(arguments)
    units = [(path.stem, device, f"{given.seconds:g}") for path in catalogue() if path.stem.startswith(SHARING)
             for device in given.devices]  # fmt: skip
    try:
        rows = play(units, rows_of, {"code": code_of(__file__), "seconds": given.seconds}, given.json, given.workers)
    except KeyboardInterrupt:
        print(f"interrupted: {given.json} has what was played; the same command goes on", file=sys.stderr)
        return 130
    print(markdown(HEADS, table(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
