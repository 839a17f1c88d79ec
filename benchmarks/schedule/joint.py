"""One pass for all that share, against streaming and against the same merge without it, on modelled devices.

Usage: python -m benchmarks.schedule.joint --json FILE [--seconds S] [--workers N] [--devices NAME ...] [--drawn N]

Every workload of the catalogue, or N drawn ones (`benchmarks/schedule/drawn.py`), with memory for 10, 25, 50 and 100 %
of the originals' weights and the largest workspace beside them. Batch costs are modelled from FLOPs and calls of
modules (`device_profiles.costs_for`), not measured. Arms, each under the better of the paper's turns and the adaptive
schedule:

- streamed: the originals streamed layer by layer, the best of the windows of `benchmarks/schedule/streamed.py`
- merged: at the ceiling, swapped or streamed in the same way, whichever gives more frames
- one pass: the same, queries of one architecture in one pass, which copies what they share once for all
- box: what `overflow: true` does today, with the pass: whole tensors, no copy beside a run
- all: the pass with memory for all merged weights, where nothing is copied: no arm can bring much more

Goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.schedule.cases import WORKLOADS, arrivals_of, catalogue, markdown
from benchmarks.schedule.drawn import write_drawn
from benchmarks.schedule.playing import Row, code_of, play
from benchmarks.schedule.rivals import OURS, THEIRS, best, best_streamed, costs_to_swap, frames_and_bytes
from benchmarks.schedule.streamed import stream_costs, streamed_layers
from gemel.analytic_costs import merge_at_ceiling, workload_originals
from gemel.edge_runtime.policies import POLICIES
from gemel.edge_runtime.policies.streaming import pick_overflow
from gemel.edge_runtime.scheduler import QuerySpec
from gemel.edge_runtime.scheduler.costs import Costs, coalesce_tensors
from gemel.edge_runtime.simulation.device_profiles import PROFILES, costs_for, overflow_layers
from gemel.edge_runtime.simulation.simulator import Simulation, simulate
from gemel.models.workload import Query, load_workload
from gemel.planner import DEFAULT_FPS

SHARES = (0.1, 0.25, 0.5, 1.0)
STREAMED, MERGED, ONE_PASS, BOX, ALL = ARMS = ("streamed", "merged", "one pass", "box", "all")
DEVICES = ("jetson-nano", "orin-nano-8gb")
HEADS = ("memory", "device", "cases", "frames", *ARMS, "one pass / streamed", "box / streamed", "all / streamed",
         "one pass / merged", "cases below streamed", "least query, one pass / merged")  # fmt: skip
SHARING = ("high", "medium", "low")
MIN_FRAMES = 20
"""A query with fewer frames in time says nothing of a ratio."""


DRAWN_SEED = 95_000
DRAWN = f"drawn-{DRAWN_SEED}-"


def queries_of(workload: str) -> Sequence[Query]:
    """The queries of a workload of the catalogue, or of a drawn one."""
    if not workload.startswith(DRAWN):
        return load_workload(WORKLOADS / f"{workload}.yaml").queries
    with TemporaryDirectory() as folder:
        return load_workload(write_drawn(Path(folder), DRAWN_SEED, int(workload.removeprefix(DRAWN)))).queries


def rows_of(workload: str, device: str, seconds: str) -> list[Row]:
    """A row for each budget of one workload on one device."""
    queries, profile = queries_of(workload), PROFILES[device]
    specs = {query.id: QuerySpec(query.fps or DEFAULT_FPS, float(query.priority)) for query in queries}
    arrivals = arrivals_of(specs, float(seconds), 0)
    originals, shared = workload_originals(queries), merge_at_ceiling(queries)
    own = {query.id: query for query in shared.queries}
    whole, merged = costs_for(profile, originals), costs_for(profile, shared)
    layers, merged_layers = streamed_layers(profile, originals), streamed_layers(profile, shared)
    weights = whole.resident_bytes(whole.tensor_bytes.keys())
    workspace = max(cost.workspace_bytes for cost in whole.queries.values())
    room = max((one.cost.workspaces[-1] for one in merged.joint), default=workspace)
    enough = weights + max(room, workspace)
    everything = best(
        both_policies(
            coalesce_tensors(merged), {}, lambda of, how: simulate(of, arrivals, enough, POLICIES[how], specs)
        )
    )
    rows = []
    for share in SHARES:
        budget = round(share * weights) + workspace

        def play_policy(of: Costs, policy: str, budget: int = budget) -> Simulation:
            return simulate(of, arrivals, budget, POLICIES[policy], specs)

        def swap_or_stream(merged: Costs, budget: int = budget, play_policy: Any = play_policy) -> Row:
            swapped, copied = costs_to_swap(merged, shared, budget)
            stream = best_streamed(lambda *how: stream_costs(merged, specs, budget, merged_layers, *how), play_policy)
            return best([*both_policies(swapped, copied, play_policy), (f"streamed, {stream['way']}", stream)])

        box = pick_overflow(merged, specs, budget, lambda query: overflow_layers(shared, own[query]), True)
        arms = {
            STREAMED: best_streamed(
                lambda *how, budget=budget: stream_costs(whole, specs, budget, layers, *how), play_policy
            ),
            MERGED: swap_or_stream(merged.with_joint(())),
            ONE_PASS: swap_or_stream(merged),
            BOX: best(both_policies(coalesce_tensors(box.costs), box.run_bytes, play_policy)),
            ALL: everything,
        }
        rows.append({
            "workload": workload, "device": device, "share": share, "received": sum(map(len, arrivals.values())),
            "joint": [list(one.queries) for one in merged.joint], "arms": arms,
        })  # fmt: skip
    return rows


def both_policies(
    costs: Costs, run_bytes: Mapping[str, int], play_policy: Callable[[Costs, str], Simulation]
) -> list[tuple[str, Row]]:
    """What the paper's turns and the adaptive schedule bring."""
    return [(policy, frames_and_bytes(play_policy(costs, policy), run_bytes)) for policy in (THEIRS, OURS)]


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
                *(f"{sums[arm] / max(1, sums[STREAMED]):.2f}" for arm in (ONE_PASS, BOX, ALL)),
                f"{sums[ONE_PASS] / max(1, sums[MERGED]):.2f}",
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
    parser.add_argument("--drawn", type=int, metavar="N", help="so many drawn workloads in place of the catalogue")
    given = parser.parse_args(arguments)
    names = [path.stem for path in catalogue() if path.stem.startswith(SHARING)]
    if given.drawn is not None:
        names = [f"{DRAWN}{number}" for number in range(given.drawn)]
    units = [(name, device, f"{given.seconds:g}") for name in names for device in given.devices]
    try:
        rows = play(units, rows_of, {"code": code_of(__file__), "seconds": given.seconds}, given.json, given.workers)
    except KeyboardInterrupt:
        print(f"interrupted: {given.json} has what was played; the same command goes on", file=sys.stderr)
        return 130
    print(markdown(HEADS, table(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
