"""Writes docs/results.md, the README's table and benchmarks/results from the records in benchmarks/measured.

Usage: python -m benchmarks.results [--check]

Every table is a CSV file and a section of benchmarks/results/index.html. A page shows the columns its marker names, and
the rows that have one value: `<!-- table: NAME | column, column | column=value -->` ... `<!-- end -->`. `--check`
writes nothing and exits with 1 where a file differs from the records.
"""

from __future__ import annotations

import argparse
import csv
import html
import io
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.compare import tables as comparing
from benchmarks.merging.acceptance import POWER_HEADS
from benchmarks.merging.cells import Cell, read_cells
from benchmarks.merging.tables import THEIRS, agreement_text, group_cells, proven_text, spread
from benchmarks.real.tables import cell_text
from benchmarks.reporting import speed as reporting
from benchmarks.schedule import objective
from benchmarks.schedule.accuracy import HEADS as ACCURACY_HEADS
from benchmarks.schedule.accuracy import mean_rows
from benchmarks.schedule.cases import ORDER as POLICIES
from benchmarks.schedule.promise import HEADS as DRAWN_HEADS
from benchmarks.schedule.promise import promise_rows
from benchmarks.schedule.speed import deciding_rows
from benchmarks.serving import tables as serving
from gemel.models.bits import FP32

REPOSITORY = Path(__file__).resolve().parents[1]
MEASURED, RESULTS = REPOSITORY / "benchmarks" / "measured", REPOSITORY / "benchmarks" / "results"
PAGES = (*(REPOSITORY / "docs" / f"{name}.md" for name in ("results", "merging", "compare")), REPOSITORY / "README.md")
MARKED = re.compile(
    r"(<!-- table: ([a-z-]+)(?: \| ([^|>]+?))?(?: \| ([^=>]+)=([^>]+?))? -->\n).*?(<!-- end -->)", re.DOTALL
)
PREVIOUS = "previous"
"""The default method of commit e385a78, which `top-down` has replaced; most recorded merges are of it."""
SIGHTS = {"first": "first", "later": "later"}
"""A merge of a workload that no constant was chosen on, as it came out first; the same with later code."""


CELL_TEXT = {
    "labels": "labels", "agreement": "footage", "between": "footage, alike for 5 to 10 minutes",
    "mix": "the same, in other parts of classes than val", "answers": "footage and answers",
    "frames": "labels by frames, nothing gained", "clips": "labels in clips, some of which hold all losses",
    "lumps": "labels in clips, each lost or gained", "footage": "footage in clips, each lost or gained",
    "looks": "labels, up to 16 models tried",
}  # fmt: skip
"""What proves in each part of the grid (benchmarks.merging.acceptance), and of the counterexamples."""


@dataclass(frozen=True)
class Table:
    """A table of one claim, and the command, machine and date of its record."""

    source: str
    heads: Sequence[str]
    rows: Sequence[Sequence[Any]]

    def select(self, columns: Sequence[str]) -> Table:
        """The table with these columns; KeyError for an unknown one."""
        known = {head: index for index, head in enumerate(self.heads)}
        at = [known[column] for column in columns]
        return Table(self.source, columns, [[row[index] for index in at] for row in self.rows])

    def where(self, column: str, value: str) -> Table:
        """The rows whose column has this value; KeyError for an unknown column."""
        at = {head: index for index, head in enumerate(self.heads)}[column]
        return Table(self.source, self.heads, [row for row in self.rows if cell_text(row[at]) == value])

    def markdown(self) -> str:
        """As Markdown."""
        lines = ["| " + " | ".join(map(cell_text, row)) + " |" for row in (self.heads, *self.rows)]
        return "\n".join([lines[0], f"|{' --- |' * len(self.heads)}", *lines[1:]])

    def csv(self) -> str:
        """As CSV."""
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows(
            [self.heads, *([cell_text(one) for one in r] for r in self.rows)]
        )
        return out.getvalue()

    def html(self, name: str) -> str:
        """As a section of a page."""

        def line(row: Sequence[Any], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(cell_text(one))}</{tag}>" for one in row) + "</tr>"

        body = "\n".join([line(self.heads, "th"), *(line(row, "td") for row in self.rows)])
        source = html.escape(self.source)
        return f'<h2 id="{name}">{name}</h2>\n<table>\n{body}\n</table>\n<p>{source}. <a href="{name}.csv">CSV</a></p>'


def build_tables(measured: Path = MEASURED) -> dict[str, Table]:
    """Every table by name."""
    tables = {path.stem: transcribed_tables(path) for path in sorted((measured / "transcribed").glob("*.json"))}
    return {
        **tables,
        **merge_tables(measured, tables["junction"]),
        **acceptance_tables(measured / "acceptance"),
        **schedule_tables(measured / "schedule"),
        **box_tables(measured),
        **paper_tables(measured),
        **compare_tables(measured / "compare"),
    }


def acceptance_tables(folder: Path) -> dict[str, Table]:
    """How often merges below their target are accepted, the worst cell of each part; how often good ones are."""
    records = [_read(path) for path in sorted(folder.glob("*.json"))]
    source = f"{', '.join(sorted({one['command'] for one in records}))}; {_machines(records)}"
    rows = [row for record in records for row in record["rows"]]
    return {
        "acceptance": Table(
            source, ("what proves", "cells", "draws of each", "seed", "worst accepted", "standard error"),
            [(CELL_TEXT[row["part"]], *(row[key] for key in ("cells", "rounds", "seed", "false", "error")))
             for row in rows if "part" in row],
        ),
        "power": Table(
            source, ("queries", "labels", "proof", "correlation", *POWER_HEADS),
            [(*(row[key] for key in ("queries", "labels", "proof")), f"{row['correlation']:g}",
              *(f"{row[key]:.2f}" for key in POWER_HEADS)) for row in rows if "proof" in row],
        ),
    }  # fmt: skip


def ablation_tables(cells: Sequence[Cell]) -> dict[str, Table]:
    """Merges with a stage of `top-down` switched off; merged and unmerged models at equal widths of weights."""
    stages, widths = list[tuple[str, ...]](), list[tuple[str, ...]]()
    for cell in cells:
        options, result = cell.asked["options"], cell.result
        off = [name for name, value in options["top_down"].items() if value is False]
        saved, worst = f"{result['saved_fraction']:.3f}", f"{min(one['ratio'] for one in cell.queries):.3f}"
        if cell.arm == "top-down" and options["weights"] == FP32:
            work = f"{result['flops']:.2e}", f"{result['seconds']:.0f}"
            stages.append((cell.workload, ", ".join(off) or "nothing", saved, worst, *work))
        if not off:
            widths.append((cell.workload, options["weights"], cell.arm, saved, worst, str(result["bytes_after"])))
    source, shown = _cells_source(cells), ("saved of all bytes", "worst query")
    return {
        "ablation": Table(source, ("workload", "switched off", *shown, "FLOPs", "seconds"), stages),
        "widths": Table(source, ("workload", "weights", "arm", *shown, "bytes left"), widths),
    }


def bits_table(cells: Sequence[Cell]) -> Table:
    """What int8 alone leaves of each workload, merging in float32, and both in the fewest bits that hold."""
    rows = list[tuple[str, ...]]()
    for workload, own in _by(cells, lambda cell: cell.workload):
        by_arm = {cell.arm: cell for cell in own}
        if by_arm.keys() < {"none", "top-down"}:
            continue
        alone, merged = by_arm["none"], by_arm["top-down"]
        wide = [row["best_bytes"] for row in merged.log if "best_bytes" in row][-1]
        bound, spent = merged.asked["options"]["max_flops"], merged.result
        rows.append((
            workload, _left_text(alone), f"{1 - wide / spent['bytes_before']:.3f}", _left_text(merged),
            agreement_text([merged]), f"{spent['flops']:.1e} of {bound:.0e}", f"{spent['processor_s'] / 60:.1f}",
        ))  # fmt: skip
    heads = ("workload", "int8 alone", "merged in float32", "merged, fewest bits", "answers as before", "FLOPs",
             "minutes of processor time")  # fmt: skip
    return Table(_cells_source(cells), heads, rows)


def _left_text(cell: Cell) -> str:
    """The part of all bytes that is left, and the worst query."""
    left = cell.result["bytes_after"] / cell.result["bytes_before"]
    return f"{left:.3f}, {min(query['ratio'] for query in cell.queries):.3f}"


def merge_tables(measured: Path, junction: Table) -> dict[str, Table]:
    """Merges by workload, target and arm; the FLOPs to equal savings; each query of each merge."""
    known = read_cells(measured / "merge")
    sights = {sight: read_cells(measured / "unseen" / sight) for sight in SIGHTS}
    cells = [("", cell) for cell in known] + [(sight, cell) for sight, own in sights.items() for cell in own]
    heads = ("workload", "sight", "target", "arm", "seeds", "saved of all bytes", "saved of the bound", "worst query",
             "met", "proven", "answers as before", "FLOPs", "seconds")  # fmt: skip
    rows = [
        (workload, sight, target, arm, *_arm_summary(own))
        for (workload, sight, target, arm), own in _by(
            cells, lambda one: (one[1].workload, one[0], one[1].target, one[1].arm)
        )
    ]
    at = {head: index for index, head in enumerate(junction.heads)}
    one = junction.rows[0]
    rows.append(("junction", "", float(one[at["target"]]), one[at["arm"]], one[at["seeds"]],
                 one[at["saved of all bytes"]], one[at["saved of the bound"]], one[at["worst ratio"]], one[at["met"]],
                 "-", "-", one[at["FLOPs"]], one[at["seconds"]]))  # fmt: skip
    source = _cells_source([cell for _, cell in cells])
    ours = [row for row in rows if row[3] == "top-down" and row[2] == 0.95]
    newest = {row[0]: row for row in sorted(ours, key=lambda row: row[1] == "later")}
    order = (
        "gti",
        "cifar",
        "published",
        "domains",
        "junction",
        "simple",
        "london",
        "kinds",
        "shop",
        "door",
        "kiosk",
        "ancestor",
        "boxes",
        "elsewhere",
    )
    others = [cell for cell in read_cells(measured / "merge-chosen") if cell.label == cell.arm]
    targets = sorted({cell.target for cell in others})
    return {
        "merges": Table(source, heads, rows),
        **ablation_tables(read_cells(measured / "ablation")),
        "bits": bits_table(read_cells(measured / "bits")),
        "summary": Table(source, heads, [newest[name] for name in order]),
        "flops": Table(
            "From the same cells",
            (
                "workload",
                "saved of the bound",
                "reached by",
                *(f"FLOPs of {arm}" for arm in (PREVIOUS, THEIRS)),
                "ratio",
            ),
            _equal_savings([*known, *sights["later"]]),
        ),
        "arms": Table(
            _cells_source(others),
            ("arm", *(f"{target:g}" for target in targets)),
            [(arm, *(_share_at(own, target) for target in targets)) for arm, own in _by(others, lambda cell: cell.arm)],
        ),
        "queries": Table(
            source,
            (
                "workload",
                "sight",
                "arm",
                "seed",
                "query",
                "metric",
                "original",
                "merged",
                "ratio",
                "answers as before",
                "met",
            ),
            [
                (
                    cell.name,
                    sight,
                    cell.arm,
                    cell.seed,
                    query["id"],
                    query["metric"].replace("_", " "),
                    query["original"],
                    query["merged"],
                    query["ratio"],
                    query.get("agreement", "-"),
                    query["met"],
                )
                for sight, cell in cells
                for query in cell.queries
            ],
        ),
    }


def schedule_tables(folder: Path) -> dict[str, Table]:
    """Policies on drawn workloads, accuracy over time on the catalogue, and the time of a decision."""
    command, drawn = "python -m benchmarks.schedule.policies", _read(folder / "promise.json")
    decided, aged = _read(folder / "deciding.json"), _read(folder / "accuracy.json")
    return {
        "accuracy": Table(
            f"python -m benchmarks.schedule.accuracy; virtual clock, modelled devices; {aged['date']}",
            ACCURACY_HEADS, mean_rows(aged["cases"]),
        ),
        "drawn": Table(
            f"{command} promise --seed {drawn['seed']}; virtual clock, modelled devices; {drawn['date']}",
            DRAWN_HEADS, promise_rows(drawn["cases"]),
        ),
        "deciding": Table(
            f"{command} deciding; {_machine(decided['machine'])}; {decided['date']}",
            ("queries", "memory", *POLICIES), deciding_rows(decided["deciding"]),
        ),
    }  # fmt: skip


def _serving_table(
    measured: Path, name: str, heads: Sequence[str], to_rows: Callable[[Any], Sequence[Sequence[Any]]]
) -> Table:
    record = _read(measured / "serving" / f"{name}.json")
    return Table(f"python -m benchmarks.serving.{name}; {_machines([record])}", heads, to_rows(record["rows"]))


def box_tables(measured: Path) -> dict[str, Table]:
    """Faults, running costs, and the time of a report."""
    faults = serving.read(measured / "faults")
    frames, start, soak = (_read(measured / "serving" / f"{name}.json") for name in ("frames", "start", "soak"))
    report, mended = _read(measured / "report.json"), _read(measured / "drift" / "mended.json")
    return {
        "faults": Table(f"make faults; {_machines(faults)}", serving.FAULT_HEADS, serving.fault_rows(faults)),
        "serving": Table(
            f"python -m benchmarks.serving.speed, python -m tests.faults.soak; {_machines([frames, start, soak])}",
            serving.COST_HEADS, serving.cost_rows(frames["frames"], start["start"], soak),
        ),
        "footprint": footprint_table(measured / "serving"),
        "push": _serving_table(measured, "push", serving.PUSH_HEADS, serving.push_rows),
        "tracking": _serving_table(measured, "tracking", serving.TRACKING_HEADS, serving.tracking_rows),
        "events": _serving_table(measured, "events", serving.EVENT_HEADS, serving.event_rows),
        "held-out": _serving_table(measured, "held_out", serving.HELD_OUT_HEADS, serving.held_out_rows),
        "motion-gating": _serving_table(measured, "motion_gating", serving.GATING_HEADS, serving.gating_rows),
        "mended": Table(
            f"{mended['command']}; {_machines([mended])}", serving.MENDED_HEADS, serving.mended_rows(mended)
        ),
        "report": Table(
            f"python -m benchmarks.reporting.speed; {_machines([report])}", reporting.HEADS, reporting.rows(report)
        ),
    }  # fmt: skip


def compare_tables(folder: Path) -> dict[str, Table]:
    """The same files several ways, and a replay of reloads (`benchmarks.compare`)."""
    records = {path.stem: _read(path) for path in sorted(folder.glob("*.json"))}
    rows = [row for record in records.values() for row in record["rows"].values()]
    source = f"make compare; {_machines(rows)}"
    return {
        "compare": Table(source, comparing.HEADS, comparing.compare_rows(records)),
        "compare-replay": Table(
            source, comparing.REPLAY_HEADS, comparing.replay_rows(records.get("replay", {"rows": {}}))
        ),
    }


def footprint_table(folder: Path) -> Table:
    """A box with merged queries beside a script with a plain session of ONNX Runtime for each original."""
    records = [_read(path) for path in sorted(folder.glob("footprint-*.json"))]
    rows = []
    for record in records:
        for process, taken in record["arms"].items():
            sizes = (f"{taken[key]:.0f}" for key in ("pss_mb", "anonymous_mb"))
            rows.append((record["what"], process, *sizes, f"{taken['processor_s']:.1f}"))
    heads = ("what", "process", "PSS, MB", "anonymous, MB", "processor time, s")
    source = f"{records[0]['command']}; {_machines(records)}; {records[0]['note']}"
    return Table(source, heads, rows)


def paper_tables(measured: Path) -> dict[str, Table]:
    """The claims of the paper (Padmanabhan et al., NSDI 2023), and the catalogue and orders they rest on."""
    record = _read(measured / "paper" / "catalogue.json")
    weights = record["catalogue"]
    played = _units(_read(measured / "schedule" / "objective.json"))
    cells = [cell for cell in read_cells(measured / "merge") if cell.target == 0.95]
    orders = read_cells(measured / "orders")
    bounds = [one["ceiling_fraction"] for one in weights]
    few = [one["half_in"] / one["layers"] for one in weights]
    gained = _points(played, objective.PAPER)
    most = max(cell.result["saved_fraction"] for cell in cells)
    by_order = {arm: fmean(cell.share for cell in own) for arm, own in _by(orders, lambda cell: cell.arm)}
    better = sorted(arm for arm, share in by_order.items() if arm != THEIRS and share >= by_order[THEIRS])
    flops = {arm: fmean(cell.result["flops"] for cell in own) for arm, own in _by(cells, lambda cell: cell.arm)}
    claims = [
        ("merging saves up to 60.7 % of memory",
         f"{most:.1%}; bounds of the catalogue {min(bounds):.1%} to {max(bounds):.1%}, median {median(bounds):.1%}",
         "yes" if most >= 0.607 else "no"),
        ("8 to 39 points of accuracy over time sharing",
         f"{min(gained):+.1f} to {max(gained):+.1f}, mean {fmean(gained):+.1f} (the paper's scheduler, simulated, "
         f"{len(gained)} cases)", "in few cases"),
        ("few layers hold most bytes", f"half of the bytes in {median(few):.0%} of the layers (median)", "yes"),
        ("adding groups one by one beats all at once",
         f"FLOPs {flops[THEIRS]:.2e} one by one, {flops[PREVIOUS]:.2e} from the top down", "no"),
        ("groups in order of memory beat other orders",
         "saved of the bound with equal FLOPs: " + ", ".join(f"{arm} {share:.2f}" for arm, share in by_order.items()),
         f"all but {', '.join(better)}" if better else "yes"),
    ]  # fmt: skip
    catalogue = [
        (one["workload"], one["queries"], round(one["bytes"] / 1e6), one["ceiling_fraction"], one["layers"],
         one["half_in"])
        for one in weights
    ]  # fmt: skip
    return {
        "paper": Table(
            "python -m benchmarks.catalogue, benchmarks.schedule.objective, benchmarks.merging.merge",
            ("the paper", "measured here", "agrees"), claims,
        ),
        "catalogue": Table(
            f"python -m benchmarks.catalogue --json FILE; {record['date']}",
            ("workload", "queries", "MB", "bound", "layers", "layers with half of the bytes"), catalogue,
        ),
    }  # fmt: skip


def fill_page(page: str, tables: Mapping[str, Table]) -> str:
    """The page with every marked table from the records; KeyError for an unknown table or column."""

    def fill(match: re.Match[str]) -> str:
        marker, name, columns, key, value, end = match.groups()
        table = tables[name].where(key, value) if key else tables[name]
        if columns:
            table = table.select([column.strip() for column in columns.split(",")])
        return f"{marker}{table.markdown()}\n{end}"

    return MARKED.sub(fill, page)


def build_files() -> dict[Path, str]:
    """Every file that this script writes, with its contents."""
    tables = build_tables()
    style = "body{font:15px system-ui;margin:2em}td,th{padding:3px 9px;border-bottom:1px solid #ddd;text-align:left}"
    sections = "\n".join(table.html(name) for name, table in tables.items())
    page = f"<!doctype html><meta charset='utf-8'><title>Gemel results</title><style>{style}</style>\n{sections}\n"
    return {
        **{path: fill_page(path.read_text(encoding="utf-8"), tables) for path in PAGES},
        **{RESULTS / f"{name}.csv": table.csv() for name, table in tables.items()},
        RESULTS / "index.html": page,
    }


def main(arguments: list[str] | None = None, build: Callable[[], dict[Path, str]] = build_files) -> int:
    """The command; 1 where --check finds a file that differs from the records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, name the files that differ")
    check = parser.parse_args(arguments).check
    stale = {path: text for path, text in build().items() if not path.is_file() or path.read_text("utf-8") != text}
    for path, text in stale.items():
        print(f"{path}: {'differs from the records' if check else 'written'}")
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return 1 if stale and check else 0


def _arm_summary(own: Sequence[tuple[str, Cell]]) -> tuple[Any, ...]:
    cells = [cell for _, cell in own]
    count = len(cells[0].queries)
    return (
        len(cells),
        spread([cell.result["saved_fraction"] for cell in cells]),
        spread([cell.share for cell in cells]),
        min(query["ratio"] for cell in cells for query in cell.queries),
        f"{min(cell.met for cell in cells)} of {count}",
        proven_text(cells),
        agreement_text(cells),
        f"{fmean(cell.result['flops'] for cell in cells):.3g}",
        round(fmean(cell.result["seconds"] for cell in cells)),
    )


def _equal_savings(cells: Sequence[Cell]) -> list[tuple[Any, ...]]:
    """The FLOPs after which each arm had saved what the other ended with, where both ran with seed 0 at 95 %."""
    rows = []
    for workload, own in _by([one for one in cells if one.target == 0.95 and one.seed == 0], lambda one: one.workload):
        arms = {cell.arm: cell for cell in own}
        if PREVIOUS in arms and THEIRS in arms:
            for ended in (arms[THEIRS], arms[PREVIOUS]):
                saved = ended.accepted_steps()[-1][1]
                ours, theirs = (arms[arm].flops_to(saved) for arm in (PREVIOUS, THEIRS))
                bound = "" if theirs else "< "
                ratio = f"{bound}{ours / (theirs or arms[THEIRS].result['flops']):.2f}" if ours else "-"
                rows.append((
                    workload, f"{saved / ended.ceiling_bytes:.3f}", ended.arm,
                    *(f"{one:.3g}" if one else "never" for one in (ours, theirs)), ratio,
                ))  # fmt: skip
    return rows


def _share_at(cells: Sequence[Cell], target: float) -> str:
    own = [cell for cell in cells if cell.target == target]
    return spread([cell.share for cell in own]) + (" !" if any(cell.met < len(cell.queries) for cell in own) else "")


def _points(played: Sequence[Mapping[str, Any]], arm: str) -> list[float]:
    """Points of accuracy over time of an arm over the originals under time sharing, case by case."""
    means = [[fmean(row["arms"][name]["accuracy"]) for name in (arm, objective.APART)] for row in played]
    return [100 * (merged - apart) for merged, apart in means]


def _by(items: Sequence[Any], key: Callable[[Any], Any]) -> list[tuple[Any, list[Any]]]:
    return list(group_cells(items, key).items())


def _units(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [row for own in record["units"].values() for row in own]


def transcribed_tables(path: Path) -> Table:
    one = _read(path)
    return Table(f"{', '.join(one['command'])}; {one['machine']}; {one['date']}", one["heads"], one["rows"])


def _cells_source(cells: Sequence[Cell]) -> str:
    machines = sorted({_machine(cell.machine) for cell in cells})
    dates = sorted(cell.date[:10] for cell in cells)
    return f"python -m benchmarks.merging.merge; {', '.join(machines)}; {dates[0]} to {dates[-1]}"


def _machines(records: Sequence[Mapping[str, Any]]) -> str:
    dates = sorted(one["date"] for one in records)
    return f"{', '.join(sorted({_machine(one['machine']) for one in records}))}; {dates[0]} to {dates[-1]}"


def _machine(machine: Mapping[str, Any]) -> str:
    device = "no GPU" if machine["device"] == "cpu" else machine["device"]
    return f"{machine['cores']} cores of an {machine['cpu']}, {device}, torch {machine['torch'].split('+')[0]}"


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    sys.exit(main())
