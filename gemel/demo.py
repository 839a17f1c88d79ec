"""`gemel demo`: the whole road on rendered camera clips, from footage to a report that can be looked at."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from edge_runtime import daemon
from edge_runtime.scheduler.costs import memory_settings
from gemel.analytic_costs import find_profile, original_costs
from gemel.conditions import DEMO_DEVICE
from gemel.evaluation import REPORT_HTML, EvalOptions, evaluate
from gemel.summaries import box_text, conclusion_text, evaluation_text
from gemel.text import duration, percent
from merger import MergeOptions, Recipe, TrainOptions, merge, train_originals
from merger.events import Progress, Stages, silent
from merger.jobs import torch_threads
from models.errors import InputError
from models.io import Exact, finite, hold_locks, open_atomic, read_json, validate
from models.workload import Workload, load_workload
from video_samples.sample import write_sample

# Bounds that keep the whole within four CPU-minutes; `gemel train` and `gemel merge` try harder.
TRAINING = {
    "classification": TrainOptions(passes=1040, max_cycles=1),
    "detection": TrainOptions(rate=2e-3, passes=1040, batch=8, max_cycles=1),
}
MERGING = MergeOptions(
    Recipe(rate=5e-4, epochs=4, batch=8, frames_per_epoch=128),
    choose_rate=False,
    margin=0.6,
    min_saving=0.02,
    precision="fp32",  # which is faster would be measured, and the outcome be another on another day
    max_flops=6e12,  # the start, one sprint, and some help for single queries
)
THREADS = 1
"""Of these small models' training: more of them wait for each other as long as they work, and the outcome would depend
on how many cores there are."""
BOX_S = 6.0
BOX_MEMORY = "50%"
RENDER, TRAIN, MERGE = "rendering the camera clips", "training the originals", "merging them"
RUN, EVALUATE = f"running the box for {BOX_S:.0f} s", "evaluating"
IDENTITY, MERGED, BUNDLE, BOX, RESULTS = "demo.json", "merge.json", "sample.safetensors", "box.yaml", "results.jsonl"


@dataclass(frozen=True)
class Demo:
    """What the demo found: `merged` as `gemel merge`, `evaluated` as `gemel eval`, `box` as `gemel run`."""

    report: Path
    merged: dict[str, Any]
    evaluated: dict[str, Any]
    box: dict[str, Any]
    seconds: float

    @property
    def met(self) -> bool:
        """Whether every query keeps its accuracy target on test."""
        return all(query["met"] for query in self.merged["queries"])

    def to_json(self) -> dict[str, Any]:
        """The keys of `gemel demo --json`."""
        keys = ("bundle", "saved_fraction", "ceiling_fraction", "queries")
        return {
            **{key: self.merged[key] for key in keys},
            "report": str(self.report),
            "streaming": self.evaluated["streaming"],
            "device": self.evaluated["device"],
            "box": self.box,
            "seconds": self.seconds,
        }

    def to_text(self) -> str:
        """The same for a terminal; the last lines say what came of it and what to look at."""
        return "\n".join([
            evaluation_text(self.evaluated),
            "",
            "the box, on this machine:",
            box_text(self.box),
            "",
            f"{duration(self.seconds)} in all; {percent(self.merged['saved_fraction'])} of the bytes saved, at most "
            f"{percent(self.merged['ceiling_fraction'])} could be",
            "",
            conclusion_text(self.evaluated),
            "",
            f"Look at {self.report}, in a browser:",
            "  1. its first screen: what to do, and which query pays for what is saved",
            "  2. 'Accuracy on the stream': originals and merged in the same memory",
            "  3. 'Frames of the test footage': what both of them answered",
        ])  # fmt: skip


class _QueryKeys(Exact, extra="allow"):
    id: str
    met: bool


class _MergedKeys(Exact, extra="allow"):
    """What is read again of a merge's report."""

    bundle: str
    saved_fraction: float
    ceiling_fraction: float
    queries: list[_QueryKeys]


def run_demo(out: str | Path, device: str = DEMO_DEVICE, seed: int = 0, progress: Progress = silent) -> Demo:
    """Render clips, train originals, merge them, run the box for some seconds, evaluate and report, all in `out`.

    A demo that was interrupted goes on after its last finished step. Raises InputError when `out` holds something
    else, or cannot be written.
    """
    started, out = time.monotonic(), Path(out)
    find_profile(device)
    _claim(out, seed)
    with hold_locks(out / IDENTITY), torch_threads(THREADS):
        return _walked(out, device, seed, progress, started)


def _walked(out: Path, device: str, seed: int, progress: Progress, started: float) -> Demo:
    """Every step that is not done yet."""
    stages = Stages(progress)
    stages.announce([RENDER, *(f"{TRAIN} ({task})" for task in TRAINING), MERGE, RUN, EVALUATE])
    stages.begin(RENDER, 1.0)
    path = out / "workload.yaml"
    workload = load_workload(path if path.exists() else write_sample(out, seed, on_progress=stages.reach))
    for task, options in TRAINING.items():
        waiting = [q.id for q in workload.queries if q.task == task and q.weights and not q.weights.exists()]
        stages.begin(f"{TRAIN} ({task})")
        if waiting:
            train_originals(workload, waiting, seed, progress, options, resume=True)
    stages.begin(MERGE)
    merged = _merged(workload, out, seed, progress)
    stages.begin(RUN)
    box = _box(workload, out, device)
    stages.begin(EVALUATE)
    evaluated = evaluate(out / BUNDLE, path, out, EvalOptions(device, memory=BOX_MEMORY), progress)
    return Demo(out / REPORT_HTML, merged, evaluated, box, round(time.monotonic() - started, 1))


def _claim(out: Path, seed: int) -> None:
    """Make the folder this demo's own; one that holds anything else is refused."""
    identity = {"demo": "sample", "seed": seed}
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(out, f"cannot be made: {error.strerror}", "choose another folder", "--out") from error
    mark = out / IDENTITY
    if not mark.exists():
        if any(out.iterdir()):
            raise InputError(out, "holds other files", "choose a new or empty folder", "--out")
        with open_atomic(mark) as file:
            file.write(json.dumps(identity).encode())
    elif read_json(mark, "choose another folder") != identity:
        raise InputError(out, "holds a demo of another seed", "choose another folder", "--out")


def _merged(workload: Workload, out: Path, seed: int, progress: Progress) -> dict[str, Any]:
    """The merge's report, from the step before an interruption where there is one."""
    kept = out / MERGED
    if not kept.exists():
        (out / BUNDLE).unlink(missing_ok=True)  # written, but its figures were not kept
        report = merge(
            workload, out / BUNDLE, "top-down", resume=True, seed=seed, progress=progress, options=MERGING
        ).to_json()
        with open_atomic(kept) as file:
            file.write(json.dumps(finite(report)).encode())
    remedy = "remove it; the demo merges again"
    recorded = read_json(kept, remedy)
    validate(kept, recorded, _MergedKeys, hint=remedy)
    return recorded


def _box(workload: Workload, out: Path, device: str) -> dict[str, Any]:
    """The real daemon on this machine over the sample clips, in a budget that the originals would not fit."""
    budget = memory_settings(original_costs(find_profile(device), workload.queries))[BOX_MEMORY]
    config = {
        "bundle": BUNDLE,
        "budget": budget,
        "engine": "torch",  # it has nothing to compile or measure first
        "cameras": {camera.id: {"source": camera.source, "fps": camera.fps} for camera in workload.cameras.values()},
        "sinks": [{"kind": "jsonl", "path": RESULTS}],
    }
    (out / RESULTS).unlink(missing_ok=True)
    with open_atomic(out / BOX, overwrite=True) as file:
        file.write(yaml.safe_dump(config, sort_keys=False).encode())
    return daemon.run(out / BOX, seconds=BOX_S)
