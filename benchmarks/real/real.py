"""The driver behind `make real`: the real workloads from footage to report, through the command line.

For each workload: prepare, `gemel train` each original, `gemel merge` (the default, with none and the paper's method
beside it), `gemel bundle verify`, `gemel run` over the clips in a budget smaller than the originals need, and
`gemel eval`. Every step leaves OUT/NAME/steps/STEP.json ({command, exit_code, seconds, result}); a step that has it
is skipped, so an interrupted run goes on where it stopped. Ends with tables of all steps.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.data.files import PrepareError, data_folder, say
from benchmarks.real.tables import SHIPPED, tables

REPOSITORY = Path(__file__).resolve().parents[2]
WORKLOADS = ("gti", "junction", "cifar", "domains")
METHODS = ("none", "top-down", "gemel")
REPORTS = {"jetson-nano": "report", "orin-nano-8gb": "report-orin"}  # where loads are slow, and where they are quick
BOX_MEMORY = "50%"  # of the way from the largest original alone to all originals together
RESULTS = "results.jsonl"
BOUNDS = {  # what keeps gti and junction within two hours on two cores
    "gti": ("--epochs", "6", "--frames-per-epoch", "256", "--min-saving", "0.005", "--max-minutes", "12"),
    "junction": (
        *("--rate", "0.0002", "--epochs", "3", "--frames-per-epoch", "128"),
        *("--min-saving", "0.01", "--max-minutes", "10"),
    ),
    "cifar": ("--epochs", "6", "--frames-per-epoch", "512", "--min-saving", "0.005", "--max-minutes", "15"),
    "domains": ("--min-saving", "0.005", "--max-minutes", "15"),
}
DEFAULT = WORKLOADS[:2]  # those with footage; images without time only when they are named
TRAINING = {  # SqueezeNet has no norms and wants a lower rate; clips of 15 s need no third cycle
    "a13-vehicles-s": ("--rate", "0.0005", "--cycles", "2"),
    "c03601-vehicles": ("--cycles", "2"),
    "c03604-vehicles": ("--rate", "0.0005", "--cycles", "2"),
    "c06514-vehicles": ("--cycles", "2"),
    **dict.fromkeys(("harbour-kind", "meadow-kind", "pond-kind"), ("--passes", "24000")),
    "quay-kind": ("--rate", "0.0003", "--passes", "14400", "--cycles", "2"),  # a VGG: most of a step is its optimiser
    "bccd-cells": ("--passes", "4000", "--cycles", "2"),
    "deeppcb-defects": ("--passes", "6000", "--cycles", "2"),
    "grocery-item": ("--passes", "10000", "--cycles", "1"),
    "pavement-surface": ("--passes", "8400", "--cycles", "1"),
    "solar-fault": ("--passes", "13700", "--cycles", "1"),
}
FALLS_SHORT = 1  # a step that ran, but whose result misses a target: a figure like any other
INTERRUPTED, TERMINATED = 130, 143
Runner = Callable[[Sequence[str]], tuple[int, str]]


class StepFailed(Exception):
    """A step ended with an exit code that is no result; `code` is passed on."""

    def __init__(self, command: str, code: int) -> None:
        super().__init__(f"{command}: exit code {code}; mend that and run `make real` again, it goes on from here")
        self.code = code


class Terminated(Exception):
    """SIGTERM came: the running step is ended too."""


def _on_sigterm(number: int, frame: object) -> None:
    raise Terminated


def call(command: Sequence[str]) -> tuple[int, str]:
    """Run a command in the repository's root; its progress goes to the terminal, its JSON comes back."""
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    try:
        out, _ = process.communicate()
    except KeyboardInterrupt:
        process.wait()  # it got the same signal and stores what it has
        raise
    except Terminated:
        process.terminate()
        process.wait()
        raise
    return process.returncode, out


@dataclass(frozen=True)
class Steps:
    """The steps of one workload: each runs once, and leaves its JSON when it is done."""

    folder: Path
    runner: Runner = call

    def result(self, name: str) -> dict[str, Any] | None:
        """What a finished step printed; None when it has not finished yet."""
        path = self._path(name)
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None

    def run(self, name: str, command: Sequence[str]) -> Any:
        """Run a command with `--json` unless it is done; StepFailed when it ends with no result."""
        done = self.result(name)
        shown = " ".join(command).replace(sys.executable, "python").replace("python -m gemel", "gemel")
        if done is not None:
            say(f"[{name}] already done in {done['seconds']:.0f} s")
            return done["result"]
        say(f"[{name}] {shown}")
        started = time.monotonic()
        code, out = self.runner([*command, "--json"])
        if code not in (0, FALLS_SHORT) or not out.strip():
            raise StepFailed(shown, code or 1)
        seconds = round(time.monotonic() - started, 1)
        step = {"command": shown, "exit_code": code, "seconds": seconds, "result": json.loads(out)}
        self.keep(name, step)
        return step["result"]

    def keep(self, name: str, step: dict[str, Any]) -> None:
        """Store a step's JSON in one go, so that a half-written one never counts as done."""
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = self._path(name).with_suffix(".partial")
        partial.write_text(json.dumps(step, indent=1) + "\n", encoding="utf-8")
        partial.replace(self._path(name))

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.json"


def gemel(*words: str | Path) -> list[str]:
    """A call of the command line, with the interpreter that runs this file."""
    return [sys.executable, "-m", "gemel", *(_short(word) for word in words)]


def _short(word: str | Path) -> str:
    """Paths as seen from the repository's root, where commands run: what is recorded holds on other machines."""
    return os.path.relpath(word, REPOSITORY) if isinstance(word, Path) else word


def bundle_of(out: Path, method: str) -> Path:
    """Where a method's bundle lies."""
    return out / "bundles" / f"{method}.safetensors"


def run_workload(name: str, data: Path, out: Path, methods: Sequence[str], runner: Runner = call) -> Steps:
    """All steps of one workload; the shipped method first, the others for comparison after it."""
    steps = Steps(out / "steps", runner)
    script = [sys.executable, "-m", "benchmarks.data.prepare", name, "--data", _short(data), "--out", _short(out)]
    steps.run("prepare", script)
    workload = out / "workload.yaml"
    queries = yaml.safe_load(workload.read_text(encoding="utf-8"))["queries"]
    steps.run("inspect", gemel("inspect", workload))
    for query in queries:
        bounds = TRAINING.get(query["id"], ())
        steps.run(f"train-{query['id']}", gemel("train", workload, "--query", query["id"], "--resume", *bounds))
    for method in sorted(methods, key=lambda method: method not in ("none", SHIPPED)):
        merge(steps, workload, bundle_of(out, method), method, BOUNDS[name])
        if method == SHIPPED:
            run_box(steps, name, out, workload)
            for device, folder in REPORTS.items():
                report = gemel("eval", bundle_of(out, SHIPPED), workload, "-o", out / folder, "--device", device)
                steps.run(f"eval-{device}", report)
    return steps


def merge(steps: Steps, workload: Path, bundle: Path, method: str, bounds: Sequence[str]) -> None:
    """Merge by one method and verify the bundle; an interrupted merge goes on from its last round."""
    bundle.parent.mkdir(parents=True, exist_ok=True)
    if steps.result(f"merge-{method}") is None:
        bundle.unlink(missing_ok=True)  # written, but its figures were not kept
    steps.run(f"merge-{method}", gemel("merge", workload, "-o", bundle, "--method", method, "--resume", *bounds))
    steps.run(f"verify-{method}", gemel("bundle", "verify", bundle))


def run_box(steps: Steps, name: str, out: Path, workload: Path) -> None:
    """The daemon over the workload's clips, in a budget that the originals would not fit."""
    originals = gemel("simulate", bundle_of(out, "none"), "--memory", BOX_MEMORY)
    budget = steps.run("simulate-none", originals)["budget_bytes"]
    steps.run("simulate-gemel", gemel("simulate", bundle_of(out, SHIPPED), "--memory", BOX_MEMORY))
    config = out / "box.yaml"
    document = box_config(yaml.safe_load(workload.read_text(encoding="utf-8")), bundle_of(out, SHIPPED), budget, out)
    config.write_text(
        f"# The {name} box: written by benchmarks.real.real\n" + yaml.safe_dump(document, sort_keys=False)
    )
    if steps.result("run") is None:
        (out / RESULTS).unlink(missing_ok=True)  # of a run that was interrupted: the sink appends
    steps.run("run", gemel("run", config))


def box_config(workload: dict[str, Any], bundle: Path, budget: int, out: Path) -> dict[str, Any]:
    """The box file of a workload: its cameras under the shipped bundle, results as JSON lines beside it."""
    fps = {query["camera"]: query["fps"] for query in workload["queries"]}
    return {
        "bundle": str(bundle.relative_to(out)),
        "budget": budget,
        "device": "auto",
        "engine": "torch",
        "cameras": {
            camera: {"source": keys["source"], "fps": keys.get("fps", fps[camera])}
            for camera, keys in workload["cameras"].items()
        },
        "sinks": [{"kind": "jsonl", "path": RESULTS}],
    }


def main(arguments: list[str] | None = None) -> int:
    """The command; 0 done, 2 bad input, 130 interrupted, else the exit code of the step that failed."""
    parser = argparse.ArgumentParser(description="The real workloads, end to end; can be interrupted and resumed.")
    parser.add_argument("workloads", nargs="*", help=f"of {', '.join(WORKLOADS)} (default: {', '.join(DEFAULT)})")
    parser.add_argument("--data", help="folder with MANIFEST.json (default: GEMEL_DATA, else ../shared/data)")
    parser.add_argument("--out", default=str(REPOSITORY / "out" / "real"), help="where to write (default out/real)")
    parser.add_argument("--methods", default=",".join(METHODS), help="methods to merge by, separated by commas")
    given = parser.parse_args(arguments)
    names = given.workloads or list(DEFAULT)
    methods = given.methods.split(",")
    if set(names) - set(WORKLOADS) or not {"none", SHIPPED} <= set(methods):
        say(f"error: workloads are {', '.join(WORKLOADS)}; --methods must hold none and {SHIPPED}")
        return 2
    out = Path(given.out).resolve()
    done: dict[str, Steps] = {}
    signal.signal(signal.SIGTERM, _on_sigterm)
    try:
        data = data_folder(given.data, REPOSITORY).resolve()
        for name in names:
            done[name] = run_workload(name, data, out / name, methods)
    except PrepareError as error:
        say(f"error: {error}")
        return 2
    except StepFailed as error:
        say(f"error: {error}")
        return error.code
    except (KeyboardInterrupt, Terminated) as error:
        say("interrupted; `make real` goes on from here")
        return TERMINATED if isinstance(error, Terminated) else INTERRUPTED
    text = "\n".join(tables(name, steps.folder) for name, steps in done.items())
    (out / "results.md").write_text(text, encoding="utf-8")
    print(text)
    say(f"reports: {', '.join(_short(out / name / 'report' / 'report.html') for name in done)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
