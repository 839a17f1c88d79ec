"""Writes the tables of docs/figures.md and docs/paper.md, and pictures, from the records below benchmarks/measured.

Usage: python -m benchmarks.figures [--check]

A table stands between `<!-- table: NAME -->` and `<!-- end -->`. NAME is a recorded table (transcribed/NAME.json:
command, machine, date, heads, rows), or it is worked out from the cells of `python -m benchmarks.merging.merge` or from
what `python -m benchmarks.schedule.policies`, `make faults`, `python -m benchmarks.serving.speed` and
`python -m benchmarks.reporting.speed` recorded.
`--check` writes nothing and ends with 1 where something is not as recorded.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import paper
from benchmarks.merging.cells import Cell, read_cells
from benchmarks.merging.plot import ACCEPT_NOTHING, curves, picture
from benchmarks.merging.tables import (
    ARM_HEADS,
    OURS,
    QUERY_HEADS,
    THEIRS,
    WORK_HEADS,
    arm_rows,
    grouped,
    query_rows,
    target_rows,
    work_rows,
)
from benchmarks.real.tables import cell_text
from benchmarks.reporting import speed as reporting
from benchmarks.schedule import grid, objective, rivals
from benchmarks.schedule.cases import DEVICES
from benchmarks.schedule.cases import ORDER as POLICIES
from benchmarks.schedule.frames import SUM_HEADS, claims, read, sums
from benchmarks.schedule.promise import HEADS as PROMISE_HEADS
from benchmarks.schedule.promise import promise_rows
from benchmarks.schedule.speed import overhead_rows, planning_rows
from benchmarks.serving import tables as serving
from models.bits import FP32

REPOSITORY = Path(__file__).resolve().parents[1]
MEASURED = REPOSITORY / "benchmarks" / "measured"
DOCS = REPOSITORY / "docs"
PAGES = ("figures.md", "paper.md")
MARKED = re.compile(r"(<!-- table: ([a-z0-9-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
MERGE, SCHEDULE = "python -m benchmarks.merging.merge", "python -m benchmarks.schedule.policies"
COSTS = ("frames", "start", "soak")
ORDER = ("gti", "cifar", OURS, THEIRS, "mainstream", "ceiling", "joint")
ARMS = ("workload", "target", *ARM_HEADS)
WORKS = ("workload", "target", *WORK_HEADS)

Table = tuple[str, Sequence[str], Sequence[Sequence[Any]]]
"""What it was measured by and on, its heads, its rows."""


def merges(today: Sequence[Cell], chosen: Sequence[Cell], recorded: Mapping[str, Table]) -> dict[str, Table]:
    """The tables about merging.

    `chosen`: cells whose originals val chose (the best of several epochs); those of `today` are the mean of the last
    two cycles, as `gemel train` makes them now.
    """
    plain = [cell for cell in chosen if cell.label == cell.arm]
    searched = [cell for cell in plain if cell.arm not in ACCEPT_NOTHING]
    others = [cell for cell in plain if cell.target == 0.95 and cell.arm != OURS]
    said, heads, rows = recorded["junction"]
    if tuple(heads) != ARMS:
        raise ValueError("junction.json: other heads than the table it stands in")
    at = sorted({cell.target for cell in plain})
    return {
        "merge": (f"{_said(today)}; junction: {said}", ARMS, [*_by_name(today, arm_rows), *rows]),
        "merge-others": (_said(others), ARMS, _by_name(others, arm_rows)),
        "merge-work": ("From the same cells", WORKS, _by_name(today, work_rows)),
        "merge-targets": (_said(searched), ("arm", *(f"{target:g}" for target in at)), target_rows(searched, at)),
    }


def first_sight(folder: Path) -> dict[str, Table]:
    """The merges of workloads that no constant was chosen on: `first` as they came out, and what was `later` made."""
    kept = {when: read_cells(folder / when) for when in ("first", "later")}
    both = [cell for cells in kept.values() for cell in cells]
    rows = [(when, *row) for when, cells in kept.items() for row in _by_name(cells, arm_rows)]
    queries = [(when, *row) for when, cells in kept.items() for row in query_rows(cells)]
    return {
        "merge-first": (_said(both), ("sight", *ARMS), rows),
        "merge-first-queries": ("From the same cells", ("sight", *QUERY_HEADS), queries),
        "merge-first-work": ("From the cells of `later`", WORKS, _by_name(kept["later"], work_rows)),
    }


def pictures(today: Sequence[Cell], chosen: Sequence[Cell]) -> dict[str, str | None]:
    """File name -> SVG: bytes saved over work for gti and cifar, and over targets for gti."""
    at_95 = [cell for cell in today if cell.target == 0.95]
    return {
        "merge-gti.svg": picture([cell for cell in at_95 if cell.workload == "gti"]),
        "merge-gti-targets.svg": curves([cell for cell in chosen if cell.label == cell.arm]),
        "merge-cifar.svg": picture([cell for cell in at_95 if cell.workload == "cifar"]),
    }


def schedules(folder: Path) -> dict[str, Table]:
    """The tables about the schedule, from what the parts of `python -m benchmarks.schedule.policies` recorded."""
    frames = [folder / f"{device}.json" for device in DEVICES]
    rows, dates = read(frames), sorted({_read(path)["date"] for path in frames})
    said = (
        f"`{SCHEDULE} frames --device DEVICE --json DEVICE.json` (`{SCHEDULE} tables FILE...` shows more); virtual "
        f"clock, modelled devices, {rows[0]['seconds']:g} s, {rows[0]['seeds']} seeds added up; {' to '.join(dates)}"
    )
    tables: dict[str, Table] = {
        "schedule": (said, SUM_HEADS, sums(rows)),
        "schedule-claims": ("From the same cases", ("of `adaptive`", "measured"), claims(rows)),
    }
    drawn = _read(folder / "promise.json")
    count = len({row["number"] for row in drawn["cases"]})
    said = (
        f"`{SCHEDULE} promise --seed {drawn['seed']} --json FILE`, the first {count} of {drawn['workloads']} "
        f"workloads, {drawn['seconds']:g} s; virtual clock, modelled devices; {drawn['date']}"
    )
    tables["promise"] = (said, PROMISE_HEADS, promise_rows(drawn["cases"]))
    for name, part, heads, of in (
        ("planning", "planning", ("queries", "memory"), planning_rows),
        ("deciding", "overhead", ("memory",), overhead_rows),
    ):
        one = _read(folder / f"{name}.json")
        load = f"one thread, load {one['machine']['load']:g}"
        said = "; ".join([f"`{SCHEDULE} {part} --json FILE`", _machine(one["machine"]), load, one["date"]])
        tables[name] = (said, (*heads, *POLICIES), of(one[part]))
    return tables


def played(folder: Path) -> dict[str, Table]:
    """The tables about rivals, objectives and the grid of arms, from what their commands recorded."""
    tables: dict[str, Table] = {}
    for name, room in (("rivals", rivals), ("objective", objective), ("grid", grid)):
        kept = _read(folder / f"{name}.json")
        rows, said = _units(kept), _said_played(name, kept)
        tables[name] = (said, room.HEADS, room.table(rows))
        if room is rivals:
            tables["rivals-left"] = ("From the same cases", rivals.LEFT_HEADS, rivals.left_to_gain(rows))
            tables["rivals-devices"] = ("From the same cases", rivals.DEVICE_HEADS, rivals.by_device(rows))
        if room is objective:
            tables["floor"] = ("From the same cases", objective.FLOOR_HEADS, objective.floor_rows(rows))
            drawn = _read(folder / "objective-drawn.json")
            flags = f" --drawn {drawn['asked']['drawn']}"
            tables["objective-drawn"] = (
                _said_played(name, drawn, flags), objective.DRAWN_HEADS, objective.drawn_table(_units(drawn)),
            )  # fmt: skip
        if room is grid:
            real = _read(folder / "grid-real.json")
            tables["grid-real"] = (_said_played(name, real, " --real"), grid.HEADS, grid.by_workload(_units(real)))
    return tables


def _said_played(name: str, kept: Mapping[str, Any], flags: str = "") -> str:
    """The command that played what was `kept`, for how long, and when."""
    device = f" --device {kept['asked']['device']}" if "device" in kept["asked"] else ""
    return (
        f"`python -m benchmarks.schedule.{name} --json FILE{flags}{device}`, {kept['asked']['seconds']:g} s of each; "
        f"virtual clock, modelled devices; {kept['date']}"
    )


def of_the_paper(measured: Path, cells: Sequence[Cell]) -> dict[str, Table]:
    """The tables of docs/paper.md, from the catalogue's weights, what was played on it, and merges at 95 %."""
    weights = _read(measured / "paper" / "catalogue.json")
    played = {name: _units(_read(measured / "schedule" / f"{name}.json")) for name in ("objective", "grid")}
    said = f"`python -m benchmarks.paper --json FILE`; {weights['date']}"
    from_both = "From the records of [figures.md](figures.md), and of the tables below"
    orders = sorted(read_cells(measured / "orders"), key=lambda cell: (cell.workload, [*paper.ORDERS].index(cell.arm)))
    claims = paper.claim_rows(weights["catalogue"], played["objective"], cells, orders)
    return {
        "paper-claims": (from_both, paper.HEADS, claims),
        "paper-orders": (_said(orders), paper.ORDER_HEADS, paper.order_rows(orders)),
        "paper-catalogue": (said, paper.CATALOGUE_HEADS, paper.catalogue_rows(weights["catalogue"])),
        "paper-sensitivity": (
            "From the record of [the grid](figures.md#the-grid)",
            paper.SENSITIVITY_HEADS,
            paper.sensitivity_rows(played["grid"]),
        ),
    }


def _units(kept: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [row for own in kept["units"].values() for row in own]


def services(folder: Path) -> dict[str, Table]:
    """The tables about a box at work, and the report's speed, from what `make faults`, a soak and measures recorded."""
    faults, speed = serving.read(folder / "faults"), [_read(folder / "serving" / f"{name}.json") for name in COSTS]
    frames, start, soak = speed
    minutes = f"`python -m tests.faults.soak --minutes {soak['minutes']:g}`"
    costs = serving.cost_rows(frames["frames"], start["start"], soak)
    report = _read(folder / "report.json")
    return {
        "report": (
            f"`python -m benchmarks.reporting.speed`; {_served([report])}",
            reporting.HEADS,
            reporting.rows(report),
        ),
        "faults": (f"`make faults`; {_served(faults)}", serving.FAULT_HEADS, serving.fault_rows(faults)),
        "serving": (f"`python -m benchmarks.serving.speed`, {minutes}; {_served(speed)}", serving.COST_HEADS, costs),
    }


def _served(found: Sequence[Mapping[str, Any]]) -> str:
    """Machine, how busy it was and dates of some records."""
    loads, dates = [one["machine"]["load"] for one in found], sorted({one["date"] for one in found})
    bare = [seconds for one in found for seconds in one["machine"].get("bare_s", ())]
    busy = f"one thread, load {' to '.join(f'{load:g}' for load in sorted({min(loads), max(loads)}))}"
    if bare:
        busy += f", `import torch, torchvision` alone took {min(bare):g} to {max(bare):g} s meanwhile"
    machines = sorted({_machine(one["machine"]) for one in found})
    return "; ".join([*machines, busy, " to ".join(sorted({dates[0], dates[-1]}))])


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def transcribed(folder: Path) -> Iterator[tuple[str, Table]]:
    """The recorded tables by name."""
    for path in sorted(folder.glob("*.json")):
        one = _read(path)
        commands = ", ".join(f"`{command}`" for command in one["command"])
        yield path.stem, (f"{commands}; {one['machine']}; {one['date']}", one["heads"], one["rows"])


def filled(page: str, tables: Mapping[str, Table]) -> str:
    """The page with every marked table as recorded; KeyError for a name that nobody recorded."""

    def one(match: re.Match[str]) -> str:
        said, heads, rows = tables[match[2]]
        lines = ["| " + " | ".join(row) + " |" for row in (heads, ["---"] * len(heads))]
        lines += ["| " + " | ".join(map(cell_text, row)) + " |" for row in rows]
        return match[1] + "\n".join([*lines, "", said + ".", match[4]])

    return MARKED.sub(one, page)


def written(measured: Path = MEASURED, docs: Path = DOCS) -> dict[Path, str]:
    """Every file that this script writes, as it should read."""
    today, chosen = _cells(measured / "merge"), _cells(measured / "merge-chosen")
    recorded = dict(transcribed(measured / "transcribed"))
    sights = (("first", "at first sight"), ("later", "later"))
    unseen = [
        replace(cell, workload=f"{cell.workload} {said}")
        for when, said in sights
        for cell in read_cells(measured / "unseen" / when)
    ]
    drawn = {docs / name: svg for name, svg in pictures(today, chosen).items() if svg is not None}
    drawn[docs / "soak.svg"] = serving.soak_picture(_read(measured / "serving" / "soak.json"))
    worked_out = {**schedules(measured / "schedule"), **played(measured / "schedule"), **services(measured)}
    worked_out |= first_sight(measured / "unseen")
    elsewhere = read_cells(measured / "merge-avx2")
    worked_out["merge-avx2"] = (_said(elsewhere), ARMS, _by_name(elsewhere, arm_rows))
    worked_out |= of_the_paper(measured, [cell for cell in (*today, *unseen) if cell.target == 0.95])
    tables = {**recorded, **merges(today, chosen, recorded), **worked_out}
    pages = {docs / name: filled((docs / name).read_text(encoding="utf-8"), tables) for name in PAGES}
    return {**pages, **drawn}


def _cells(folder: Path) -> list[Cell]:
    """The cells of a folder, those of the first of ORDER first."""
    return sorted(read_cells(folder), key=lambda cell: (ORDER.index(cell.workload), cell.target, ORDER.index(cell.arm)))


def _by_name(cells: Sequence[Cell], rows: Callable[[Sequence[Cell]], list[tuple[Any, ...]]]) -> list[tuple[Any, ...]]:
    """The rows of each workload at each target, headed by both."""
    found = grouped(cells, lambda cell: (cell.workload, cell.target)).items()
    return [(name, f"{target:g}", *row) for (name, target), own in found for row in rows(own)]


def _said(cells: Sequence[Cell]) -> str:
    """The commands, machines and dates of some cells."""
    commands = [_command(own) for own in grouped(cells, lambda cell: (cell.workload, cell.label != cell.arm)).values()]
    machines = sorted({_machine(cell.machine) for cell in cells})
    dates, loads = sorted({cell.date for cell in cells}), [cell.machine["load"] for cell in cells]
    span = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    load = f"one thread, load {' to '.join(dict.fromkeys(f'{one:g}' for one in (min(loads), max(loads))))}"
    return "; ".join([", ".join(f"`{command}`" for command in commands), *machines, load, span])


def _command(cells: Sequence[Cell]) -> str:
    """What measures these cells, of one workload, and what else these options give."""
    options = cells[0].asked["options"]
    several = {
        "--arms": dict.fromkeys(cell.arm for cell in cells),
        "--targets": dict.fromkeys(f"{cell.target:g}" for cell in cells),
        "--seeds": dict.fromkeys(str(cell.seed) for cell in cells),
    }
    words = [MERGE, "--workloads", cells[0].workload, *(" ".join((key, *values)) for key, values in several.items())]
    if not options.get("choose_rate"):
        words += [f"--rate {options['recipe']['rate']:g} --work {options['max_flops']:g}"]
    words += [f"--weights {options['weights']}"] * (options["weights"] != FP32)
    return " ".join(words)


def _machine(machine: Mapping[str, Any]) -> str:
    card = "no GPU" if machine["device"] == "cpu" else machine["device"]
    return f"{machine['cores']} cores of an {machine['cpu']}, {card}, torch {machine['torch'].split('+')[0]}"


def main(arguments: list[str] | None = None, files: Callable[[], dict[Path, str]] = written) -> int:
    """The command; 1 where --check finds a file that is not as recorded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, name what differs")
    given = parser.parse_args(arguments)
    stale = {path: text for path, text in files().items() if not path.is_file() or path.read_text("utf-8") != text}
    for path, text in stale.items():
        print(f"{path}: {'is not as recorded' if given.check else 'written'}")
        if not given.check:
            path.write_text(text, encoding="utf-8")
    return 1 if stale and given.check else 0


if __name__ == "__main__":
    sys.exit(main())
