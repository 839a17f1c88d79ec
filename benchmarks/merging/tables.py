"""The tables that `benchmarks/merging/merge.py` ends with, from the cells it left."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import mean
from typing import Any, TypeVar

from benchmarks.merging.cells import EQUAL, Cell
from benchmarks.real.tables import table

T = TypeVar("T")
OURS, THEIRS = "top-down", "gemel"
ARM_HEADS = (
    "arm",
    "seeds",
    "saved / ceiling",
    "saved / all bytes",
    "worst ratio",
    "met",
    "proven",
    "answers as before",
    "FLOPs",
    "seconds",
)
ARMS_TITLE = "Arms, judged on test; met and proven: on the worst seed"
QUERY_HEADS = ("workload", "arm", "seed", "query", "metric", "original", "merged", "ratio", "answers as before", "met")
FLOPS_HEADS = ("seed", "bytes saved that", "/ ceiling", f"FLOPs of {OURS}", f"FLOPs of {THEIRS}", "ratio")


def summary(cells: Sequence[Cell]) -> str:
    """Markdown: per workload its arms and the FLOPs to equal savings; then what each target costs, and the machines."""
    parts = []
    for name, own in group_cells(cells, lambda cell: cell.name).items():
        title = f"## {name}: {len(own[0].queries)} queries, target {own[0].target:g}"
        parts += [
            title,
            table(ARMS_TITLE, ARM_HEADS, arm_rows(own)),
            table("FLOPs to equal savings", FLOPS_HEADS, flops_rows(own)),
        ]
    parts += [_targets(name, own) for name, own in group_cells(cells, lambda cell: cell.workload).items()]
    parts.append(_machine_table(cells))
    return "\n\n".join(part for part in parts if part) + "\n"


def group_cells(cells: Iterable[T], key: Callable[[T], Any]) -> dict[Any, list[T]]:
    """The cells by a key, in the order in which keys first appear."""
    found: dict[Any, list[T]] = {}
    for cell in cells:
        found.setdefault(key(cell), []).append(cell)
    return found


def spread(values: Sequence[float]) -> str:
    """The mean, and from where to where the values reach when they differ."""
    if not values:
        return "-"
    low, high = f"{min(values):.3f}", f"{max(values):.3f}"
    return f"{mean(values):.3f}" + (f" ({low}..{high})" if low != high else "")


def arm_rows(cells: Sequence[Cell]) -> list[tuple[Any, ...]]:
    """A row of ARM_HEADS for each arm; the cells are those of one workload at one target."""
    rows = []
    for arm, own in group_cells(cells, lambda cell: cell.label).items():
        count = len(own[0].queries)
        rows.append((
            arm,
            len(own),
            spread([cell.share for cell in own]),
            spread([cell.result["saved_fraction"] for cell in own]),
            min((query["ratio"] for cell in own for query in cell.queries), default=None),
            f"{min(cell.met for cell in own)} of {count}",
            proven_text(own),
            agreement_text(own),
            f"{mean(cell.result['flops'] for cell in own):.3g}",
            f"{mean(cell.result['seconds'] for cell in own):.0f}",
        ))  # fmt: skip
    return rows


def proven_text(cells: Sequence[Cell]) -> str:
    """Queries proven or unchanged on the worst seed; "-" for records that are older than such proofs."""
    counts = [cell.proven for cell in cells]
    known = [count for count in counts if count is not None]
    return f"{min(known)} of {len(cells[0].queries)}" if len(known) == len(counts) else "-"


def agreement_text(cells: Sequence[Cell]) -> str:
    """The part of answers that are the originals'; "-" for records without it."""
    parts = [cell.agreement for cell in cells]
    known = [part for part in parts if part is not None]
    return spread(known) if len(known) == len(parts) else "-"


def query_rows(cells: Sequence[Cell]) -> list[tuple[Any, ...]]:
    """A row of QUERY_HEADS for each query of each cell, on test."""
    return [
        (
            cell.name, cell.label, cell.seed, query["id"], query["metric"].replace("_", " "),
            query["original"] if query["worth"] else f"{query['original']:.3f} (no evidence)",
            query["merged"], query["ratio"],
            query.get("agreement"),
            "yes" if query["met"] else "no",
        )
        for cell in cells
        for query in cell.queries
    ]  # fmt: skip


def flops_rows(cells: Sequence[Cell]) -> list[tuple[Any, ...]]:
    """For each seed with both arms, FLOPS_HEADS: the FLOPs by which each had accepted what the other ended with."""
    rows = []
    for seed, own in group_cells(cells, lambda cell: cell.seed).items():
        by_arm = {cell.arm: cell for cell in own}
        if OURS not in by_arm or THEIRS not in by_arm:
            continue
        ours, theirs = by_arm[OURS], by_arm[THEIRS]
        for ended in (theirs, ours):
            saved = ended.accepted_steps()[-1][1]
            if saved > EQUAL * ended.ceiling_bytes:
                flops = _compare_flops(ours, theirs, saved)
                rows.append((seed, f"`{ended.arm}` ended with", saved / ended.ceiling_bytes, *flops))
    return rows


def _compare_flops(ours: Cell, theirs: Cell, saved_bytes: float) -> tuple[str, str, str]:
    """The FLOPs of both and their ratio; one that never got there shows all it spent, and the ratio is a bound."""
    flops = [(cell.flops_to(saved_bytes), cell.result["flops"]) for cell in (ours, theirs)]
    shown = [f"{reached:.3g}" if reached is not None else f"never, in {spent:.3g}" for reached, spent in flops]
    (mine, _), (other, spent) = flops
    if mine is None:
        return shown[0], shown[1], "-"
    least = other if other is not None else spent
    ratio = f"{'' if other is not None else 'below '}{mine / least:.3f}" if least else "-"
    return shown[0], shown[1], ratio


def target_rows(cells: Sequence[Cell], targets: Sequence[float]) -> list[tuple[str, ...]]:
    """For each arm what it saves at each target, with a mark where a query missed it; the cells of one workload."""
    rows = []
    for arm, own in group_cells(cells, lambda cell: cell.label).items():
        by_target = group_cells(own, lambda cell: cell.target)
        rows.append((arm, *(_at_target(by_target.get(target, [])) for target in targets)))
    return rows


def _targets(workload: str, cells: Sequence[Cell]) -> str:
    targets = sorted({cell.target for cell in cells})
    if len(targets) < 2:
        return ""
    title = f"{workload}: bytes saved / ceiling at each target (!: a query missed it on test)"
    return table(title, ("arm", *(f"{target:g}" for target in targets)), target_rows(cells, targets))


def _at_target(cells: Sequence[Cell]) -> str:
    missed = any(cell.met < len(cell.queries) for cell in cells)
    return spread([cell.share for cell in cells]) + (" !" if missed else "")


def _machine_table(cells: Sequence[Cell]) -> str:
    rows = []
    for machine, own in group_cells(cells, lambda cell: _machine(cell.machine)).items():
        dates, loads = sorted(cell.date for cell in own), [cell.machine["load"] for cell in own]
        rows.append((machine, len(own), dates[0], dates[-1], f"{min(loads):g} to {max(loads):g}"))
    return table("Machines", ("machine", "cells", "from", "to", "load"), rows)


def _machine(machine: dict[str, Any]) -> str:
    return f"{machine['cores']} x {machine['cpu']}, {machine['device']}, torch {machine['torch']}"
