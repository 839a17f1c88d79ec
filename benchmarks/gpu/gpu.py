"""Proves on a machine with a GPU what was built without one; rehearsed on the CPU.

Usage: python -m benchmarks.gpu.gpu [--device cuda|cpu] [--small] [--done FILE] [--minutes 10] [--only STAGE ...]

Stages in order of worth, each a process of its own with a time limit. What a stage found is one JSON line, printed and
added to FILE (default out/gpu.jsonl): what held, what did not, what was left out and why; what it had found by then
where it broke or was ended. A stage that stands there as
passed for this device and size is not run again, so the same command goes on where it was interrupted, or ran out of
minutes. Ends with 0 when every stage has passed, with 1 when one has not, or is still to do.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOUND = "found: "
"""Begins a line in which a stage tells a figure, should it not come to its end."""
MIN_S = 15.0
"""A stage is not begun with less time left than this."""


@dataclass(frozen=True)
class Stage:
    """A function of a module here, given a `Setting` and a `Found`; seconds after which it is ended."""

    module: str
    function: str
    limit_s: float


STAGES: Mapping[str, Stage] = {
    "environment": Stage("ceilings", "environment", 60),
    "transfer": Stage("moving", "moves", 120),
    "faults": Stage("moving", "faults", 60),
    "outputs": Stage("running", "outputs", 180),
    "forms": Stage("running", "forms", 120),
    "memory": Stage("swapping", "no_memory", 60),
    "swap": Stage("swapping", "swap", 90),
    "speed": Stage("running", "speed", 180),
    "joint": Stage("passes", "joint", 90),
    "sessions": Stage("sessions", "share", 120),
    "serving": Stage("serving", "serve", 150),
    "merging": Stage("training", "merge", 180),
    "layout": Stage("training", "lay_out", 180),
    "whole": Stage("training", "whole", 180),
}


def main(given: Sequence[str] | None = None) -> int:
    """Run what is still to do; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="a rehearsal: few rounds, small models")
    parser.add_argument("--done", type=Path, default=Path("out/gpu.jsonl"), metavar="FILE")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--only", nargs="*", choices=tuple(STAGES), default=list(STAGES), metavar="STAGE")
    parser.add_argument("--stage", choices=tuple(STAGES), help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    if options.stage:
        print(json.dumps(carry_out(options.stage, options.device, options.small)))
        return 0
    ends = time.monotonic() + 60 * options.minutes
    size = "small" if options.small else "whole"
    passed = passed_stages(options.done, options.device, size)
    undone = []
    for name in options.only:
        if name in passed:
            print(f"{name}: passed before", file=sys.stderr)
            continue
        left_s = ends - time.monotonic()
        if left_s < MIN_S:
            undone.append(name)
            continue
        line = {"stage": name, "device": options.device, "size": size, **run_stage(name, options, left_s)}
        with open_to_append(options.done) as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)
        undone += [] if line["passed"] else [name]
    if undone:
        print(f"to do: {' '.join(undone)}; the same command goes on", file=sys.stderr)
    return 1 if undone else 0


def passed_stages(done: Path, device: str, size: str) -> set[str]:
    """The stages that passed on this device and in this size; a line that was cut short says nothing."""
    passed = set()
    for text in done.read_text().splitlines() if done.is_file() else []:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if (line.get("device"), line.get("size"), line.get("passed")) == (device, size, True):
            passed.add(line["stage"])
    return passed


def open_to_append(done: Path) -> Any:
    """The file, at the begin of a line."""
    done.parent.mkdir(parents=True, exist_ok=True)
    cut = done.is_file() and not done.read_bytes().endswith(b"\n") and done.stat().st_size
    file = done.open("a")
    if cut:
        file.write("\n")
    return file


def run_stage(name: str, options: argparse.Namespace, left_s: float) -> dict[str, Any]:
    """What became of a stage in a process of its own."""
    command = [
        sys.executable,
        "-X",
        "faulthandler",
        "-m",
        __spec__.name if __spec__ else "benchmarks.gpu.gpu",
        "--stage",
        name,
    ]
    command += ["--device", options.device, *(["--small"] if options.small else [])]
    limit_s, start = min(STAGES[name].limit_s, left_s), time.monotonic()
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired as late:
        fault = f"not done after {limit_s:.0f} s"
        return {"passed": False, "seconds": round(limit_s, 1), "fault": fault, "found": read_figures(late.stderr)}
    seconds = round(time.monotonic() - start, 1)
    lines = ended.stdout.strip().splitlines()
    if ended.returncode or not lines:
        lines = [line for line in ended.stderr.strip().splitlines() if not line.startswith(FOUND)]
        crash = next((at for at, line in enumerate(lines) if line.startswith("Fatal Python error")), None)
        shown = lines[-3:] if crash is None else lines[crash : crash + 10]
        fault = f"ended with {ended.returncode}: {' | '.join(shown)}"
        return {"passed": False, "seconds": seconds, "fault": fault, "found": read_figures(ended.stderr)}
    return {"seconds": seconds, **json.loads(lines[-1])}


def read_figures(errors: str | bytes | None) -> dict[str, Any]:
    """The figures that a stage had found when it was ended."""
    text = errors.decode(errors="replace") if isinstance(errors, bytes) else errors or ""
    found: dict[str, Any] = {}
    for line in text.splitlines():
        if line.startswith(FOUND):
            with suppress(ValueError):  # cut short
                found.update(json.loads(line.removeprefix(FOUND)))
    return found


def carry_out(name: str, device: str, small: bool) -> dict[str, Any]:
    """A stage, here and now."""
    import torch

    from benchmarks.gpu.found import Found, Setting

    def tell(name: str, value: Any) -> None:
        print(FOUND + json.dumps({name: value}), file=sys.stderr, flush=True)

    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("there is no GPU here (rehearse with --device cpu --small)")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    stage, found = STAGES[name], Found(timed=device == "cuda", tell=tell)
    module = importlib.import_module(f"benchmarks.gpu.{stage.module}")
    with tempfile.TemporaryDirectory() as folder:
        where = torch.device(device, 0) if device == "cuda" else torch.device(device)
        getattr(module, stage.function)(Setting(where, small, Path(folder)), found)
    return {"passed": not found.missed, "missed": found.missed, "left_out": found.left_out, "found": found.figures}


if __name__ == "__main__":
    sys.exit(main())
