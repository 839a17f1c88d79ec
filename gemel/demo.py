"""`gemel demo`: render camera clips, train, merge, run a box and evaluate, in one folder."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gemel.analytic_costs import find_profile, original_costs
from gemel.conditions import DEMO_DEVICE
from gemel.edge_runtime.life import daemon
from gemel.edge_runtime.scheduler.costs import memory_settings
from gemel.evaluation import REPORT_HTML, EvalOptions, evaluate
from gemel.merger import MergeOptions, Recipe, TopDownConfig, TrainOptions, merge, train_originals
from gemel.merger.distributed import torch_threads
from gemel.merger.events import Change
from gemel.models.errors import InputError
from gemel.models.files.io import finite, hold_locks, open_atomic, read_json
from gemel.models.stages import Progress, Stages, silent
from gemel.models.workload import Workload, load_workload
from gemel.report.document import Report
from gemel.summaries import box_text, conclusion_text, evaluation_text
from gemel.text import duration, percent
from gemel.video_samples.sample import FOOTAGE, write_sample

# Bounds that keep the whole within five minutes of one core; `gemel train` and `gemel merge` try harder.
TRAINING = {
    "classification": TrainOptions(passes=1040, max_cycles=1),
    "detection": TrainOptions(rate=2e-3, passes=1040, batch=8, max_cycles=1),
}
DEARER = (Change.NETWORK_TRAINED, Change.TRUNK, Change.LAYERS, Change.HALF)
MERGING = MergeOptions(
    Recipe(rate=5e-4, epochs=5, batch=32, micro_batch=32, frames_per_epoch=128, evaluate_from=5),
    min_saving=0.02,
    documents=True,
    weights="int8",  # of models this small, int4 changes more answers than this footage could prove
    top_down=TopDownConfig(without=DEARER),  # what changes more takes more than a minute
)
THREADS = 1
"""Of the training: these models are too small for more, and the result would depend on the number of cores."""
BOX_S = 6.0
BOX_MEMORY = "50%"
RENDER, TRAIN, MERGE = "rendering the camera clips", "training the originals", "merging the models"
RUN, EVALUATE = f"running the box for {BOX_S:.0f} s", "evaluating"
IDENTITY, MERGED, BUNDLE, BOX, RESULTS = "demo.json", "merge.json", "sample.safetensors", "box.yaml", "results.jsonl"


@dataclass(frozen=True)
class Demo:
    """The demo's results: `merged` of `gemel merge`, `evaluated` of `gemel eval`, `box` of `gemel run`."""

    report: Path
    merged: dict[str, Any]
    evaluated: Report
    box: dict[str, Any]
    seconds: float

    @property
    def met(self) -> bool:
        """Whether every query keeps its accuracy target on test."""
        return all(query["met"] for query in self.merged["queries"])

    @property
    def proven(self) -> int:
        """Queries whose accuracy is proven."""
        return sum(query["proven"] for query in self.merged["queries"])

    def to_json(self) -> dict[str, Any]:
        """The keys of `gemel demo --json`."""
        keys = ("bundle", "saved_fraction", "ceiling_fraction", "queries")
        return {
            **{key: self.merged[key] for key in keys},
            "report": str(self.report),
            **self.evaluated.model_dump(mode="json", include={"streaming", "device"}),
            "box": self.box,
            "seconds": self.seconds,
        }

    def to_text(self) -> str:
        """The results as text, with what to look at."""
        return "\n".join([
            evaluation_text(self.evaluated),
            "",
            "the box, on this machine:",
            box_text(self.box),
            "",
            f"{duration(self.seconds)} in all; {self.proven} of {len(self.merged['queries'])} queries proven; "
            f"{percent(self.merged['saved_fraction'])} of the bytes saved; all layers that fit, shared, would save "
            f"{percent(self.merged['ceiling_fraction'])}",
            "",
            conclusion_text(self.evaluated),
            "",
            f"Look at {self.report}, in a browser:",
            "  1. its first screen: what to do, and which query loses accuracy",
            "  2. 'Accuracy on the stream': originals and merged in the same memory",
            "  3. 'Frames of the test footage': what both of them answered",
        ])  # fmt: skip


def run_demo(out: str | Path, device: str = DEMO_DEVICE, seed: int = 0, progress: Progress = silent) -> Demo:
    """Render clips, train originals, merge them, run the box for some seconds, evaluate and report, all in `out`.

    An interrupted demo continues after its last finished step. Raises InputError when `out` holds other files or
    cannot be written.
    """
    started, out = time.monotonic(), Path(out)
    find_profile(device)
    _claim_folder(out, seed)
    with hold_locks(out / IDENTITY), torch_threads(THREADS):
        return _run_steps(out, device, seed, progress, started)


def _run_steps(out: Path, device: str, seed: int, progress: Progress, started: float) -> Demo:
    """Run the steps that are not done yet."""
    stages = Stages(progress)
    stages.announce([RENDER, *(f"{TRAIN} ({task})" for task in TRAINING), MERGE, RUN, EVALUATE])
    stages.begin(RENDER, 1.0)
    path = out / "workload.yaml"
    if not path.exists():
        write_sample(out, seed, footage=FOOTAGE, on_progress=stages.reach)
    workload = load_workload(path)
    for task, options in TRAINING.items():
        waiting = [q.id for q in workload.queries if q.task == task and q.weights and not q.weights.exists()]
        stages.begin(f"{TRAIN} ({task})")
        if waiting:
            train_originals(workload, waiting, seed, progress, options, resume=True)
    stages.begin(MERGE)
    merged = _merge_once(workload, out, seed, progress)
    stages.begin(RUN)
    box = _run_box(workload, out, device)
    stages.begin(EVALUATE)
    evaluated = evaluate(out / BUNDLE, path, out, EvalOptions(device, memory=BOX_MEMORY), progress)
    return Demo(out / REPORT_HTML, merged, evaluated, box, round(time.monotonic() - started, 1))


def _claim_folder(out: Path, seed: int) -> None:
    """Mark the folder as this demo's; InputError if it holds other files."""
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


def _merge_once(workload: Workload, out: Path, seed: int, progress: Progress) -> dict[str, Any]:
    """Merge, or read the report of a merge that is finished."""
    kept = out / MERGED
    if not kept.exists():
        (out / BUNDLE).unlink(missing_ok=True)  # its report was not written
        report = merge(workload, out / BUNDLE, resume=True, seed=seed, progress=progress, options=MERGING)
        with open_atomic(kept) as file:
            file.write(json.dumps(finite(report.to_json())).encode())
    return read_json(kept, "remove it; the demo merges again")


def _run_box(workload: Workload, out: Path, device: str) -> dict[str, Any]:
    """Run the box on this machine over the sample clips, in a budget that the originals would exceed."""
    budget = memory_settings(original_costs(find_profile(device), workload.queries))[BOX_MEMORY]
    config = {
        "bundle": BUNDLE,
        "budget": budget,
        "engine": "torch",  # starts without compiling
        "cameras": {camera.id: {"source": camera.source, "fps": camera.fps} for camera in workload.cameras.values()},
        "sinks": [{"kind": "jsonl", "path": RESULTS}],
    }
    (out / RESULTS).unlink(missing_ok=True)
    with open_atomic(out / BOX, overwrite=True) as file:
        file.write(yaml.safe_dump(config, sort_keys=False).encode())
    return daemon.run(out / BOX, seconds=BOX_S)
