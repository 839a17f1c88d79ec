"""The fault table with its full counts, measured on real boxes (`make faults`).

Usage: python -m tests.faults.measure [NAME ...] [--times N] [--out FOLDER] [--again] [--record]

Each scenario is recorded in OUT/NAME.json once it is over; one that is there is not played again, so an interrupted
run continues. With `--record` the records are moved to benchmarks/measured/faults at the end, and
the table of docs/results.md is written. The exit code is 1 where something did not hold.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.machine import machine
from tests.faults.catalogue import SCENARIOS
from tests.faults.scenario import Found, Missing, Scenario

RECORDED = results.MEASURED / "faults"


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="those alone")
    parser.add_argument("--times", type=int, help="how often, for all of them; as the table says unless given")
    parser.add_argument("--out", type=Path, default=Path("out/faults"), help="default: out/faults")
    parser.add_argument("--again", action="store_true", help="play also what is recorded")
    parser.add_argument("--record", action="store_true", help="at the end: to benchmarks/measured and docs/results.md")
    given = parser.parse_args(arguments)
    if unknown := set(given.names) - {one.name for one in SCENARIOS}:
        parser.error(
            f"no such fault: {', '.join(sorted(unknown))}; there are {', '.join(one.name for one in SCENARIOS)}"
        )
    given.out.mkdir(parents=True, exist_ok=True)
    fell_short = False
    for one in SCENARIOS:
        path = given.out / f"{one.name}.json"
        if given.names and one.name not in given.names:
            continue
        if not path.exists() or given.again:
            try:
                row = play(one, given.times or one.full)
            except Missing as why:
                print(f"{one.name}: left out: {why}", flush=True)
                continue
            new = path.with_suffix(".new")
            new.write_text(json.dumps(row, indent=2) + "\n", encoding="utf-8")
            new.replace(path)
        row = json.loads(path.read_text(encoding="utf-8"))
        wrong = [*row["broken"], *row["slow"]]
        fell_short = fell_short or bool(wrong)
        print(f"{one.name}: {row['said']}", *(f"  DID NOT HOLD: {line}" for line in wrong), sep="\n", flush=True)
    if given.record:
        RECORDED.mkdir(parents=True, exist_ok=True)
        for path in (given.out / f"{one.name}.json" for one in SCENARIOS):
            if path.exists():
                shutil.move(path, RECORDED / path.name)
        results.main([])
    return 1 if fell_short else 0


def play(one: Scenario, times: int) -> dict[str, Any]:
    """The record of a scenario that was played so often; an assertion that a box did not keep is one thing more that
    did not hold.
    """
    began, load, bare = time.monotonic(), os.getloadavg()[0], [bare_s()]
    with tempfile.TemporaryDirectory(prefix="gemel-fault-") as folder:
        try:
            found = one.run(Path(folder), times, lambda said: print(f"{one.name}: {said}", flush=True))
        except AssertionError as error:
            found = Found("it was not played to its end", {}, [str(error)[-2000:]])
    bare.append(bare_s())
    on = {**machine(), "bare_s": bare, "load": round(max(load, os.getloadavg()[0]), 1)}
    return {
        "name": one.name, "fault": one.fault, "must": one.must, "times": times, "unit": one.unit, "said": found.said,
        "figures": found.figures, "broken": found.broken, "slow": found.slow,
        "seconds": round(time.monotonic() - began), "machine": on, "date": str(datetime.date.today()),
    }  # fmt: skip


def bare_s() -> float:
    """How long importing torch takes at present, which every start of a box does: so busy is the machine."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch, torchvision"], check=True)
    return round(time.monotonic() - began, 1)


if __name__ == "__main__":
    sys.exit(main())
