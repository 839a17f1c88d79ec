"""What the schedule aims at: frames in time or accuracy over time; and whether any query pays for the others.

Usage: python -m benchmarks.schedule.objective --json FILE [--drawn SEED --workloads N] [--seconds S] [--workers N]

Every workload of the catalogue on five modelled devices at min, 50 % and 75 % of what its originals need. Arms: the
originals under the paper's time-sharing, their weights evicted in the pieces that the merged models consist of, and
merged at the ceiling under the paper's schedule and under `adaptive` with either objective. The same originals in
pieces of their own stand beside: which query loses under time-sharing hangs on such things, too. Accuracy over time of
a query: at each frame's moment the newest finished answer counts as much as an answer of its age is worth by the
staleness curve of its task, relative to a fresh one; that merged models answer differently is no part of this. Goes on
where it was stopped. With `--drawn` workloads drawn at random in place of the
catalogue's (`benchmarks.schedule.drawn`).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.schedule.cases import SETTINGS, WORKLOADS, arrivals_of, case_of, catalogue, markdown
from benchmarks.schedule.drawn import write_drawn
from benchmarks.schedule.playing import Row, code_of, play
from gemel.edge_runtime.policies import POLICIES
from gemel.edge_runtime.scheduler.costs import coalesce_tensors, memory_settings
from gemel.edge_runtime.scheduler.types import MAX_AGES, Curve, QuerySpec, accuracy_at, mean_accuracy
from gemel.edge_runtime.simulation.device_profiles import PROFILES
from gemel.edge_runtime.simulation.simulator import Simulation, simulate
from gemel.models.workload import load_workload

CURVES = Path(__file__).resolve().parents[1] / "measured" / "schedule" / "staleness.json"
APART, PAPER, FRAMES, ACCURACY = ARMS = ("time-sharing, originals", "gemel", "adaptive, frames", "adaptive, accuracy")
OTHERWISE = "time-sharing, own pieces"
POLICY = {OTHERWISE: "time-sharing", APART: "time-sharing", PAPER: "gemel", FRAMES: "adaptive", ACCURACY: "adaptive"}
HEADS = (
    "memory",
    "device",
    "cases",
    *ARMS,
    "worst query",
    "queries below the floor",
    "furthest below",
    "below own pieces",
)
DRAWN_HEADS = (
    "memory", "cases", "queries", *ARMS, "accuracy more / as much / less than `gemel`", "least", "below the floor",
    "furthest below",
)  # fmt: skip
FLOOR_HEADS = ("workload", "device", "memory", "query", *ARMS, OTHERWISE)
MIN_LOSS = 0.005
"""Accuracy over time that a query may have less than its original before it counts as below the floor."""


def curves() -> dict[str, tuple[float, Curve]]:
    """The recorded curve of each task, and the rate at which it was measured."""
    kept = json.loads(CURVES.read_text(encoding="utf-8"))
    return {task: (one["fps"], tuple(one["curve"])) for task, one in kept["tasks"].items()}


def at_rate(curve: Curve, measured_fps: float, fps: float) -> Curve:
    """The same curve by the frames of another rate."""
    count = min(MAX_AGES, round((len(curve) - 1) * fps / measured_fps) + 1)
    return tuple(accuracy_at(curve, age * measured_fps / fps) for age in range(max(2, count)))


def accuracy_over_time(played: Simulation, demands: Mapping[str, QuerySpec], worth: Mapping[str, Curve]) -> list[float]:
    """Of each query: the mean over its frames' moments of what the newest finished answer is worth at its age."""
    moments: dict[str, list[float]] = {query: [] for query in demands}
    answers: dict[str, list[tuple[float, float]]] = {query: [] for query in demands}
    for frame in played.frames:
        moments[frame.query].append(frame.captured_at)
        if frame.finished_at is not None:
            answers[frame.query].append((frame.finished_at, frame.captured_at))
    return [mean_accuracy(worth[query], demand.fps, sorted(moments[query]), sorted(answers[query]))
            for query, demand in demands.items()]  # fmt: skip


def drawn_rows(seed: str, number: str, device: str, seconds: str) -> list[Row]:
    """A row for each memory setting of one drawn workload on one device."""
    with tempfile.TemporaryDirectory() as folder:
        return _rows(write_drawn(Path(folder), int(seed), int(number)), device, seconds)


def rows_of(workload: str, device: str, seconds: str) -> list[Row]:
    """A row for each memory setting of one workload of the catalogue on one device."""
    return _rows(WORKLOADS / f"{workload}.yaml", device, seconds)


def _rows(path: Path, device: str, seconds: str) -> list[Row]:
    case, known = case_of(path, device), curves()
    tasks = {query.id: query.task for query in load_workload(path).queries}
    worth = {query: at_rate(known[task][1], known[task][0], case.demands[query].fps) for query, task in tasks.items()}
    aware = {query: replace(demand, staleness=worth[query]) for query, demand in case.demands.items()}
    arrivals = arrivals_of(case.demands, float(seconds), 0)
    shared, apart = coalesce_tensors(case.shared), coalesce_tensors(case.apart)
    rows = []
    for setting in SETTINGS:
        budget, arms = memory_settings(case.apart)[setting], {}
        for arm in (*ARMS, OTHERWISE):
            costs, demands = apart if arm == OTHERWISE else shared, aware if arm == ACCURACY else case.demands
            played = simulate(costs, arrivals, budget, POLICIES[POLICY[arm]], demands)
            arms[arm] = {
                "accuracy": [round(one, 4) for one in accuracy_over_time(played, case.demands, worth)],
                "in_time": [row["processed"] - row["late"] for row in played.per_query()],
            }
        rows.append(
            {"workload": case.workload, "device": device, "memory": setting, "queries": list(tasks), "arms": arms}
        )
    return rows


def below(row: Row, arm: str, floor: str = APART) -> list[tuple[float, str]]:
    """The queries that have less than their originals under time-sharing: by how much, and which; worst first."""
    found = zip(row["arms"][arm]["accuracy"], row["arms"][floor]["accuracy"], row["queries"], strict=True)
    return sorted((mine - theirs, query) for mine, theirs, query in found if mine < theirs - MIN_LOSS)


def table(rows: Sequence[Row]) -> list[tuple[Any, ...]]:
    """A row of HEADS for each memory setting and device, and for all devices."""
    found = []
    for setting in SETTINGS:
        for device in (*dict.fromkeys(row["device"] for row in rows), "all"):
            chosen = [row for row in rows if row["memory"] == setting and device in (row["device"], "all")]
            if not chosen:
                continue
            means = [_mean([_mean(row["arms"][arm]["accuracy"]) for row in chosen]) for arm in ARMS]
            least = [_mean([min(row["arms"][arm]["accuracy"]) for row in chosen]) for arm in ARMS]
            lost = {arm: [one for row in chosen for one in below(row, arm)] for arm in ARMS[1:]}
            found.append((
                setting, device, len(chosen), *(f"{one:.3f}" for one in means),
                " / ".join(f"{one:.3f}" for one in least), " / ".join(str(len(one)) for one in lost.values()),
                " / ".join(f"{min(one)[0]:.2f}" if one else "-" for one in lost.values()),
                " / ".join(str(sum(len(below(row, arm, OTHERWISE)) for row in chosen)) for arm in ARMS),
            ))  # fmt: skip
    return found


def floor_rows(rows: Sequence[Row]) -> list[tuple[Any, ...]]:
    """Every query that has less than its original in either pieces although accuracy was aimed at, the furthest below
    first.
    """
    found = []
    for row in rows:
        lost = {query: loss for floor in (OTHERWISE, APART) for loss, query in below(row, ACCURACY, floor)}
        for query, loss in lost.items():
            place = row["queries"].index(query)
            shown = [f"{row['arms'][arm]['accuracy'][place]:.3f}" for arm in (*ARMS, OTHERWISE)]
            found.append((loss, row["workload"], row["device"], row["memory"], query, *shown))
    return [line[1:] for line in sorted(found)]


def drawn_table(rows: Sequence[Row]) -> list[tuple[Any, ...]]:
    """A row of DRAWN_HEADS for each memory setting, and for all."""
    found = []
    for setting in (*SETTINGS, "all"):
        chosen = [row for row in rows if setting in (row["memory"], "all")]
        means = {arm: [_mean(row["arms"][arm]["accuracy"]) for row in chosen] for arm in ARMS}
        more = [mine - theirs for mine, theirs in zip(means[ACCURACY], means[PAPER], strict=True)]
        lost = [one for row in chosen for one in below(row, ACCURACY)]
        found.append((
            setting, len(chosen), sum(len(row["queries"]) for row in chosen),
            *(f"{_mean(means[arm]):.3f}" for arm in ARMS),
            " / ".join(str(sum(one)) for one in (
                [one > MIN_LOSS for one in more], [abs(one) <= MIN_LOSS for one in more],
                [one < -MIN_LOSS for one in more],
            )),
            f"{min(more):.3f}", len(lost), f"{min(lost)[0]:.3f}" if lost else "-",
        ))  # fmt: skip
    return found


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def main(arguments: list[str] | None = None) -> int:
    """The command; 130 where it was interrupted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="where to keep what was played")
    parser.add_argument("--drawn", type=int, metavar="SEED", help="workloads drawn at random from this seed")
    parser.add_argument("--workloads", type=int, default=40, help="how many of them; 40 unless given")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each play; 60 unless given")
    parser.add_argument("--workers", type=int, help="processes; one for each core unless given")
    given = parser.parse_args(arguments)
    on_paper, seconds = given.drawn is None, f"{given.seconds:g}"
    names = [(path.stem,) for path in catalogue()] if on_paper else number_cases(given.drawn, given.workloads)
    units = [(*name, device, seconds) for name in names for device in PROFILES]
    asked = {"code": code_of(__file__, str(CURVES)), "seconds": given.seconds, "drawn": given.drawn}
    try:
        rows = play(units, rows_of if on_paper else drawn_rows, asked, given.json, given.workers)
    except KeyboardInterrupt:
        print(f"interrupted: {given.json} has what was played; the same command goes on", file=sys.stderr)
        return 130
    print(markdown(HEADS, table(rows)) if on_paper else markdown(DRAWN_HEADS, drawn_table(rows)))
    return 0


def number_cases(seed: int, workloads: int) -> list[tuple[str, ...]]:
    return [(str(seed), str(number)) for number in range(workloads)]


if __name__ == "__main__":
    sys.exit(main())
