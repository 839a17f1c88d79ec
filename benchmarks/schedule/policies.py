"""The schedule's figures over the catalogue's workloads, device profiles and memory settings (docs/results.md).

Usage: python -m benchmarks.schedule.policies frames [--device D ...] [--seeds N] [--seconds S] [--json FILE]
       python -m benchmarks.schedule.policies planning | deciding [--json FILE]
       python -m benchmarks.schedule.policies promise --json FILE [--seed N] [--workloads N] [--limit-s S]
       python -m benchmarks.schedule.policies tables FILE...

frames: every workload of benchmarks/workloads but the real ones, merged at the ceiling (each group of layers shares one
weight) on three modelled device profiles at min, 50 % and 75 % of what the originals need. `time-sharing`, `gemel` and
`adaptive` get the same frames: each query's rate, phases drawn from the seed, the box empty at the start. The bound of
`bound.py` stands beside. Cases that FILE has of the same code are not measured again. planning: seconds to plan
15 and 1,000 queries made of the catalogue's. deciding: CPU time of a decision for 15 of these. promise:
workloads drawn at random (`drawn.py`) on all devices at min, 50 % and 75 %, `adaptive` against `gemel`; goes on where
it was stopped, and stops after S seconds. tables: those of docs/results.md from the files that `frames` wrote, one for
each device, say. Exit code 1 when `adaptive` has less than 98 % of the frames in time of `gemel` in any case, or a
query less than 80 % of what `gemel` gave it.
"""

from __future__ import annotations

import argparse
import json
from datetime import date
from pathlib import Path

from benchmarks.machine import machine
from benchmarks.schedule.cases import DEVICES, markdown
from benchmarks.schedule.frames import SUM_HEADS, measure, misses, read, sums
from benchmarks.schedule.promise import HEADS, broken_cases, play, promise_rows
from benchmarks.schedule.speed import deciding, planning


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("part", choices=("frames", "planning", "deciding", "promise", "tables"))
    parser.add_argument("files", nargs="*", type=Path, help="tables: what `frames --json` wrote")
    parser.add_argument("--device", action="append", choices=DEVICES)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seed", type=int, default=80_000)
    parser.add_argument("--workloads", type=int, default=100)
    parser.add_argument("--limit-s", type=float)
    args = parser.parse_args()
    if args.part in ("frames", "tables"):
        rows = (
            measure(args.device or DEVICES, args.seconds, args.seeds, args.json)
            if args.part == "frames"
            else read(args.files)
        )
        missed = misses(rows)
        print("\n".join([markdown(SUM_HEADS, sums(rows)), "", *(f"missed: {line}" for line in missed)]))
        return bool(missed)
    if args.part == "promise":
        if args.json is None:
            parser.error("promise: say with --json FILE where to keep the cases")
        cases = play(args.seed, args.workloads, args.seconds, args.json, args.limit_s)
        failed = broken_cases(cases)
        print("\n".join([markdown(HEADS, promise_rows(cases)), *(f"broken: {row}" for row in failed)]))
        return bool(failed)
    found = planning() if args.part == "planning" else deciding(args.seconds)
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "date": date.today().isoformat(), args.part: found}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
