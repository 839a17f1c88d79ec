"""Damaged files of every kind, as long as asked: `python -m tests.hostile.mutated.fuzz --minutes 10`.

The seed is printed and repeats the run. Each finding is written under `out/fuzz` (the smallest file of those that fail
alike, and beside it the command and what came of it). The counts per kind end it: refused, found wanting, accepted,
findings; exit code 1 if there are any.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from tests.hostile.harness import Runaway
from tests.hostile.mutated.kinds import KINDS, DamageCase, DamageRunner, draw_case
from tests.hostile.samples import write_house

HANGS_S = 60.0
OUTCOMES = {2: "refused", 1: "wanting", 0: "accepted"}


def work(whole: Path, folder: Path, names: list[str], seed: str, end: float) -> None:
    """One worker: tries cases until the end and appends a line for each to `lines.jsonl`.

    The case at hand lies in `now.bin` and `now.json`, so that one which kills the process is known.
    """
    random = Random(seed)
    runner = DamageRunner(whole, folder / "house")
    with (folder / "lines.jsonl").open("a") as lines:
        while time.time() < end:
            case = draw_case(random.choice(names), whole, random)
            (folder / "now.bin").write_bytes(case.data)
            (folder / "now.json").write_text(json.dumps({"kind": case.kind, "command": [*map(str, case.command)]}))
            outcome, message = _outcome(runner, case)
            line = {"kind": case.kind, "outcome": outcome, "bytes": len(case.data), "message": message}
            if outcome == "finding":
                _keep(folder, case.data, line)
            print(json.dumps(line), file=lines, flush=True)


def _outcome(runner: DamageRunner, case: DamageCase) -> tuple[str, str]:
    """How a case came out, and what was wrong with that; the first line of it says what is alike."""
    try:
        return OUTCOMES[runner.evaluate(case)], ""
    except AssertionError as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return "finding", f"{where.name}: {where.line}\n{error}"
    except (Exception, Runaway) as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        alike = f"{type(error).__name__} at {where.filename.rpartition('/')[2]}: {where.line}"
        return "finding", f"{alike}\n{''.join(traceback.format_exception(error))}"


def _keep(folder: Path, data: bytes, line: dict[str, Any]) -> None:
    """Write the damaged file and its finding."""
    name = f"finding-{time.time_ns()}"
    (folder / name).write_bytes(data)
    line["file"] = name
    line["command"] = json.loads((folder / "now.json").read_text())["command"]


def fuzz(minutes: float, seed: int, names: list[str], out: Path, workers: int) -> Counter[tuple[str, str]]:
    """Try cases for so long in `workers` processes; the counts by kind and outcome. Findings lie in `out` after it."""
    counts: Counter[tuple[str, str]] = Counter()
    findings: dict[str, tuple[int, Path, dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["XDG_CACHE_HOME"] = str(Path(temporary) / "cache")
        whole = Path(temporary) / "whole"
        whole.mkdir()
        write_house(whole)
        end = time.time() + 60 * minutes
        places = [Path(temporary) / f"worker-{number}" for number in range(workers)]
        context = multiprocessing.get_context("spawn")
        running: dict[Path, Any] = {}
        started: Counter[Path] = Counter()
        while running or time.time() < end:
            for place in places:
                process = running.get(place)
                if process is not None and process.is_alive() and not _hangs(place):
                    continue
                if process is not None:
                    why = "hangs" if process.is_alive() else f"ends the process ({process.exitcode})"
                    process.kill()
                    process.join()
                    del running[place]
                    if process.exitcode != 0:
                        _note_dead(place, why)
                if time.time() < end:
                    place.mkdir(exist_ok=True)
                    started[place] += 1
                    again = f"{seed} {place.name} {started[place]}"
                    running[place] = context.Process(target=work, args=(whole, place, names, again, end))
                    running[place].start()
            time.sleep(0.2)
        for place in places:
            for line in _lines(place):
                counts[line["kind"], line["outcome"]] += 1
                if line["outcome"] == "finding":
                    alike = f"{line['kind']}: {line['message'].partition(chr(10))[0]}"
                    if alike not in findings or line["bytes"] < findings[alike][0]:
                        findings[alike] = (line["bytes"], place / line["file"], line)
        _write_findings(out, findings)
    return counts


def _hangs(place: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return time.time() - (place / "now.json").stat().st_mtime > HANGS_S
    return False


def _note_dead(place: Path, why: str) -> None:
    if not (place / "now.json").exists():  # it never came to a case
        raise RuntimeError(f"a worker {why}")
    now = json.loads((place / "now.json").read_text())
    data = (place / "now.bin").read_bytes()
    line = {"kind": now["kind"], "outcome": "finding", "bytes": len(data), "message": why}
    _keep(place, data, line)
    (place / "now.json").unlink()
    with (place / "lines.jsonl").open("a") as lines:
        print(json.dumps(line), file=lines)


def _lines(place: Path) -> Iterator[dict[str, Any]]:
    with contextlib.suppress(FileNotFoundError):
        yield from map(json.loads, (place / "lines.jsonl").read_text().splitlines())


def _write_findings(out: Path, findings: dict[str, tuple[int, Path, dict[str, Any]]]) -> None:
    shutil.rmtree(out, ignore_errors=True)
    for number, (alike, (_, path, line)) in enumerate(sorted(findings.items())):
        folder = out / f"{number:03}-{line['kind'].replace(' ', '-')}"
        folder.mkdir(parents=True)
        shutil.copyfile(path, folder / Path(KINDS[line["kind"]].file).name)
        command = f"gemel {' '.join(line['command'])}"
        (folder / "message.txt").write_text(f"{command}\n{line['message']}\n", errors="backslashreplace")
        print(f"{folder}: {command}: {alike}")


def format_counts(counts: Counter[tuple[str, str]]) -> str:
    """The counts as a table of markdown."""
    columns = (*OUTCOMES.values(), "finding")
    rows = ["| kind | tried | refused | found wanting | accepted | findings |", "| --- | --: | --: | --: | --: | --: |"]
    for kind in (*(kind for kind in KINDS if any(kind == one for one, _ in counts)), "all"):
        per = [
            sum(count for (one, what), count in counts.items() if kind in (one, "all") and what == column)
            for column in columns
        ]
        rows.append(f"| {kind} | {sum(per)} | {' | '.join(map(str, per))} |")
    return "\n".join(rows)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--kind", action="append", choices=tuple(KINDS), help="only this kind (may be repeated)")
    parser.add_argument("--out", type=Path, default=Path("out/fuzz"))
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    seed = int.from_bytes(os.urandom(4), "big") if args.seed is None else args.seed
    print(f"seed {seed}", flush=True)
    counts = fuzz(args.minutes, seed, args.kind or list(KINDS), args.out, args.workers)
    print(format_counts(counts))
    return int(any(what == "finding" for _, what in counts))


if __name__ == "__main__":
    sys.exit(main())
