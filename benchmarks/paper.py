"""The paper's claims (Padmanabhan et al., GEMEL, NSDI 2023) beside what was recorded here, for docs/paper.md.

Usage: python -m benchmarks.paper --json FILE

The command works out, without weights or footage, what the fifteen workloads of the catalogue weigh, what they could
share at most and how few layers hold how much. `python -m benchmarks.figures` makes the tables from that and from the
other records; no figure in them is typed by hand.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.merging.cells import Cell
from benchmarks.merging.tables import OURS, THEIRS, grouped, spread
from benchmarks.schedule.cases import catalogue
from benchmarks.schedule.objective import ACCURACY, APART, PAPER
from gemel.inspection import inspect_workload
from models.io import open_atomic
from models.sharing.layers import layers_of_all
from models.workload import load_workload

HEADS = ("the paper says", "here, simulated on the catalogue", "here, measured on real workloads", "agrees")
CATALOGUE_HEADS = ("workload", "queries", "MB", "ceiling", "layers", "layers with half of the bytes")
SENSITIVITY_HEADS = ("over all else", "time-sharing", "`gemel`", "`adaptive`", "`gemel` over time-sharing")
ORDER_HEADS = (
    "workload", "groups in order of", "flops", "saved / ceiling after a quarter", "after half", "in the end", "met",
)  # fmt: skip
ORDERS = {THEIRS: "memory", "earliest": "place, first", "latest": "place, last", "random": "chance",
          "one-model": "memory, one model at a time"}  # fmt: skip
PARTS = (1 / 4, 1 / 2)
SAVED, GAINED = 0.607, (8.0, 39.0)
"""The paper's abstract: memory saved up to this share; points of accuracy over time and space sharing."""

Row = Mapping[str, Any]


def weighed(path: Path) -> dict[str, Any]:
    """What a workload's models weigh and could share; `half_in` is how few layers hold half of their bytes."""
    workload = load_workload(path)
    found = inspect_workload(workload)
    sizes = sorted((layer.bytes for layer in layers_of_all(workload.queries)), reverse=True)
    held, count = 0, 0
    while 2 * held < sum(sizes):
        held, count = held + sizes[count], count + 1
    return {
        "workload": path.stem, "queries": len(found.queries), "bytes": found.total_bytes,
        "ceiling_fraction": round(found.ceiling_fraction, 4), "layers": len(sizes), "half_in": count,
    }  # fmt: skip


def catalogue_rows(weights: Sequence[Row]) -> list[tuple[Any, ...]]:
    """A row of CATALOGUE_HEADS for each workload."""
    return [
        (one["workload"], one["queries"], round(one["bytes"] / 1e6), f"{one['ceiling_fraction']:.3f}", one["layers"],
         f"{one['half_in']} ({one['half_in'] / one['layers']:.0%})")
        for one in weights
    ]  # fmt: skip


def order_rows(cells: Sequence[Cell]) -> list[tuple[Any, ...]]:
    """A row of ORDER_HEADS for each workload and order that the search took its groups in, all with the same work."""
    rows = []
    for (workload, order), own in grouped(cells, lambda cell: (cell.workload, ORDERS[cell.arm])).items():
        flops = own[0].asked["options"]["max_flops"]
        shares = [spread([_share_after(cell, part * flops) for cell in own]) for part in PARTS]
        met = min(cell.met for cell in own)
        shares.append(spread([cell.share for cell in own]))  # a group that was begun is tried to its end
        rows.append((workload, order, f"{flops:.3g}", *shares, f"{met} of {len(own[0].queries)}"))
    return rows


def _share_after(cell: Cell, flops: float) -> float:
    """The part of the ceiling that was saved after so much work."""
    return max(saved for spent, saved in cell.accepted() if spent <= flops) / cell.ceiling_bytes


def claim_rows(
    weights: Sequence[Row], played: Sequence[Row], cells: Sequence[Cell], orders: Sequence[Cell]
) -> list[tuple[Any, ...]]:
    """A row of HEADS for each claim.

    `weights` are those of the catalogue, `played` the rows of `benchmarks.schedule.objective`, `cells` merges at 95 %,
    `orders` those of the search in each of its orders, all with the same work.
    """
    ceilings = [one["ceiling_fraction"] for one in weights]
    few = [one["half_in"] / one["layers"] for one in weights]
    gained, theirs = (_points(played, arm) for arm in (ACCURACY, PAPER))
    saved = _by_workload(cells, lambda cell: cell.result["saved_fraction"])
    reached = _by_workload(cells, lambda cell: cell.result["saved_fraction"] / cell.result["ceiling_fraction"])
    flops = _by_workload(cells, lambda cell: cell.result["flops"])
    most = max((value for own in saved.values() for value in own.values()), default=0.0)
    return [
        (f"merging saves up to {SAVED:.1%} of memory",
         f"{min(ceilings):.1%} to {max(ceilings):.1%} if all that can is shared, median {median(ceilings):.1%}",
         _told(saved, "{:.1%}"), _agrees(most >= SAVED)),
        (f"{GAINED[0]:g} to {GAINED[1]:g} points of accuracy over sharing time and space alone",
         f"{min(gained):+.1f} to {max(gained):+.1f} points, {fmean(gained):+.1f} on average ({len(gained)} cases; with "
         f"the paper's schedule {min(theirs):+.1f} to {max(theirs):+.1f}, {fmean(theirs):+.1f})",
         "see the streaming table of figures.md", "in few cases" if max(gained) > GAINED[0] > fmean(gained) else
         _agrees(fmean(gained) >= GAINED[0])),
        ("a few layers hold most of the bytes",
         f"half of the bytes lie in {min(few):.0%} to {max(few):.0%} of the layers, median {median(few):.0%}", "-",
         _agrees(median(few) < 0.25)),
        ("what is saved comes near to the most that can be", "-", "of the ceiling: " + _told(reached, "{:.3f}"),
         "not where models are small and unlike"),
        ("adding one group after the other beats all at once", "-",
         "work (image passes x FLOPs): " + _told(flops, "{:.2e}"), "no"),
        ("groups in order of memory beat earliest, latest, random, one model at a time", "-",
         "of the ceiling with the same work: " + _told(_by_workload(orders, lambda cell: cell.share), "{:.3f}"),
         _first(orders)),
    ]  # fmt: skip


def sensitivity_rows(played: Sequence[Row]) -> list[tuple[Any, ...]]:
    """A row of SENSITIVITY_HEADS for each setting of the grid (`benchmarks.schedule.grid`): accuracy over time."""
    rows = []
    for key in ("memory", "fps", "sla_ms"):
        for value in dict.fromkeys(row[key] for row in played):
            own = [row["arms"] for row in played if row[key] == value]
            apart, paper, ours = (fmean(arms[name]["accuracy"] for arms in own) for name in ("none", "gemel", "wide"))
            named = f"{key.removesuffix('_ms')} {value}"
            rows.append((named, f"{apart:.3f}", f"{paper:.3f}", f"{ours:.3f}", f"{100 * (paper - apart):+.1f} points"))
    return rows


def _points(played: Sequence[Row], arm: str) -> list[float]:
    """Points of accuracy over time that an arm has over the originals under time-sharing, case by case."""
    means = [[fmean(row["arms"][name]["accuracy"]) for name in (arm, APART)] for row in played]
    return [100 * (merged - apart) for merged, apart in means]


def _first(orders: Sequence[Cell]) -> str:
    """Whether the order of memory saves more than all other orders of the search do, on every workload."""
    found = _by_workload(orders, lambda cell: cell.share).values()
    level = sorted({arm for shares in found for arm in shares if arm != THEIRS and shares[arm] >= shares[THEIRS]})
    return "all but " + ", ".join(f"`{arm}`" for arm in level) if level else "yes"


def _by_workload(cells: Sequence[Cell], value: Callable[[Cell], float]) -> dict[str, dict[str, float]]:
    """Workload -> arm -> the mean over its seeds, of the methods that share part by part or all."""
    found: dict[str, dict[str, list[float]]] = {}
    for cell in cells:
        if cell.label in (OURS, *ORDERS):
            found.setdefault(cell.workload, {}).setdefault(cell.label, []).append(value(cell))
    return {workload: {arm: fmean(each) for arm, each in sorted(own.items())} for workload, own in found.items()}


def _told(values: Mapping[str, Mapping[str, float]], how: str) -> str:
    return "; ".join(
        f"{workload} " + ", ".join(f"`{arm}` {how.format(one)}" for arm, one in own.items())
        for workload, own in values.items()
    )


def _agrees(holds: bool) -> str:
    return "yes" if holds else "no"


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    given = parser.parse_args(arguments)
    kept = {"catalogue": [weighed(path) for path in catalogue()], "date": datetime.date.today().isoformat()}
    with open_atomic(given.json, overwrite=True) as file:
        file.write(json.dumps(kept, indent=2).encode() + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
