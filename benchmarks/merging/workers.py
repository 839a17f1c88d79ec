"""What workers bring a merge on one machine: the same merge alone and with workers, in turn.

Usage: python -m benchmarks.merging.workers WORKLOAD.yaml [--method gemel] [--work 2e13] [--workers 2] [--rounds 1]

Arms: `workers`, so many with one thread each; `one thread`, a single process with one; `all threads`, a single process
with as many as there are workers, which is what a merge without workers would take. The table gives median wall
seconds, the same over those of `all threads`, the work, and whether the bundle is that of `one thread`, byte by byte.
Idle cores show what there is to gain; busy ones gain nothing. Bundles are not kept.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.data.files import say
from benchmarks.machine import machine
from gemel.progress import shown_on
from merger import METHODS, MergeOptions, Resources, merge
from models.errors import InputError
from models.workload import load_workload

ONE, ALL, WORKERS = "one thread", "all threads", "workers"
BAD_INPUT = 2


@dataclass
class Arm:
    """One way to do the merge, and what its rounds took and left."""

    resources: Resources
    seconds: list[float] = field(default_factory=list)
    work: set[float] = field(default_factory=set)
    bundles: set[str] = field(default_factory=set)

    def run(self, workload: Path, method: str, options: MergeOptions) -> None:
        """Merge once more."""
        with tempfile.TemporaryDirectory() as folder, shown_on() as progress:
            bundle = Path(folder) / "merged.safetensors"
            began = time.perf_counter()
            report = merge(
                load_workload(workload), bundle, method, progress=progress, options=options, resources=self.resources
            )
            self.seconds.append(time.perf_counter() - began)
            self.work.add(report.work)
            with bundle.open("rb") as file:
                self.bundles.add(hashlib.file_digest(file, "sha256").hexdigest())


def measured(workload: Path, method: str, options: MergeOptions, workers: int, rounds: int) -> dict[str, Arm]:
    """Every arm, as often as asked for, in turn."""
    arms = {
        ALL: Arm(Resources(workers=1, threads=workers)),
        ONE: Arm(Resources(workers=1, threads=1)),
        WORKERS: Arm(Resources(workers=workers, threads=1)),
    }
    for number in range(rounds):
        for name, arm in arms.items():
            say(f"round {number + 1} of {rounds}: {name}")
            arm.run(workload, method, options)
    return arms


def table(arms: dict[str, Arm]) -> str:
    """The arms as Markdown."""
    least = statistics.median(arms[ALL].seconds)
    lines = ["| arm | seconds | / all threads | work | bundle |", "| --- | ---: | ---: | ---: | --- |"]
    for name, arm in arms.items():
        seconds = statistics.median(arm.seconds)
        same = "the same" if arm.bundles == arms[ONE].bundles else "another"
        work = ", ".join(f"{work:.3g}" for work in sorted(arm.work))
        lines.append(f"| {name} | {seconds:.0f} | {seconds / least:.2f} | {work} | {same} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """The command; 0 done, 2 bad input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", type=Path)
    parser.add_argument("--method", default="gemel", choices=METHODS)
    parser.add_argument("--work", type=float, help="bound of each merge, as in `gemel merge --max-work`")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    given = parser.parse_args(arguments)
    options = MergeOptions(max_work=given.work, precision="fp32")  # `auto` times a step, and may decide otherwise
    try:
        arms = measured(given.workload, given.method, options, given.workers, given.rounds)
    except InputError as error:
        say(f"error: {error}")
        return BAD_INPUT
    found = machine()
    print(f"{given.method}, {given.workers} workers, {found['cpu']}, load {found['load']}, torch {found['torch']}\n")
    print(table(arms), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
