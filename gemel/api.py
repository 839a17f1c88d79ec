"""The public Python API: each function takes paths, imports what it needs, and returns a value."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gemel.conditions import DEFAULT_CONDITIONS, DEFAULT_DEVICE, Conditions
from gemel.models.errors import InputError

_OPTION = re.compile(r"(?<![^\s'\"`(])--([a-z]+(?:-[a-z]+)*)")
_ARGUMENTS = {"from": "before", "resume": "resume=True", "accept-unproven": "accept_unproven=True"}
"""Options that are written otherwise as arguments."""
MIN_SHOWN_SCORE = 0.25
"""Detections of a file's model with lower scores are left out by `predict`."""

if TYPE_CHECKING:
    from gemel.conditions import Objective, Shared
    from gemel.drift import DriftCheck
    from gemel.drift_mend import DriftMend
    from gemel.inspection import Inspection
    from gemel.merger import MergeOptions, MergeReport, TrainOptions, TrainResult
    from gemel.models.bundle import Bundle
    from gemel.models.export.export_folder import ExportedFolder
    from gemel.models.export.onnx_file import Batch, ExportedModel
    from gemel.models.predictor import FrameModel
    from gemel.models.preprocess import Preprocess
    from gemel.models.workload import Workload
    from gemel.packing import PackReport
    from gemel.placement import Placement
    from gemel.planner import BoxPlan, SimulationResult
    from gemel.proving import ProveResult
    from gemel.report.comparison import ReportComparison
    from gemel.report.document import Report


Progress = Callable[..., None]
ShownProgress = Progress | Literal["auto"] | None
"""A callable for events (models.stages), None for none, or "auto": a bar on a terminal and in a notebook."""


def in_python(text: str) -> str:
    """A text of the command line with its options as arguments: `--max-minutes` as `max_minutes`."""
    return _OPTION.sub(lambda found: _ARGUMENTS.get(found[1], found[1].replace("-", "_")), text)


def speak_python(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with the errors of a user's input in words of Python."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except InputError as error:
            others = error.others
            for one in (error, *others):
                InputError.__init__(one, *map(in_python, (one.where, one.problem, one.hint, one.key)))
            error.others = others
            raise

    return call


def open_bundle(path: str | Path, factories: Collection[str] = ()) -> Bundle:
    """Map a bundle read-only; `.build(query_id)` gives a query's merged model.

    That is a `torch.nn.Module` in eval mode, whose `.preprocess` turns a frame, uint8 RGB (H, W, 3), into the batch
    (1, 3, H, W) that it takes. `factories` lists the `package.module:factory` models that may be imported for it, from
    the current folder or Python's path. Raises InputError when the file cannot be read, BundleError when it is unsound.
    """
    from gemel.models import bundle

    return bundle.open_bundle(_check_path(path, "the bundle"), factories, Path.cwd())


def load_model(
    path: str | Path,
    *,
    classes: Sequence[str] = (),
    task: str | None = None,
    decoder: str = "auto",
    preprocess: Preprocess | None = None,
    min_score: float = MIN_SHOWN_SCORE,
) -> FrameModel:
    """The model of an .onnx or .pt2 file as a `torch.nn.Module` in eval mode.

    `.preprocess` turns a frame, uint8 RGB (H, W, 3), into the batch that it takes; `.decode` turns its outputs into
    boxes (N, A, 4) in fractions of the input and scores, or into probabilities; `.predict` does all for one frame, from
    `min_score` on. What the file does not say is given by name. Raises InputError for a file that cannot be taken.
    """
    from gemel.models.decoders.files import load_file
    from gemel.models.preprocess import Preprocess

    path = _check_path(path, "the model")
    if isinstance(classes, str):
        raise InputError(path, f"'{classes}' is one text", f"give a list: classes=['{classes}']", "classes")
    if odd := [name for name in classes if not isinstance(name, str)]:
        raise InputError(path, f"{odd[0]!r} is {type(odd[0]).__name__}", "name classes by text", "classes")
    if preprocess is not None and not isinstance(preprocess, Preprocess):
        hint = "give gemel.Preprocess((height, width), scale=1, ...)"
        raise InputError(path, f"is {type(preprocess).__name__}", hint, "preprocess")
    if isinstance(min_score, bool) or not isinstance(min_score, int | float) or not 0 <= min_score <= 1:
        raise InputError(path, f"is {min_score!r}", "give a number from 0 to 1", "min_score")
    return load_file(path, tuple(classes), task, decoder, preprocess, min_score)


def export(
    bundle: str | Path | Bundle,
    query: str,
    out: str | Path,
    batch: Batch | None = None,
    factories: Collection[str] = (),
) -> ExportedModel:
    """Write one query's merged model as an ONNX file; InputError where it cannot be (models.export.query_export)."""
    from gemel.models.export.query_export import export_query

    opened = open_bundle(bundle, factories) if isinstance(bundle, str | Path) else bundle
    return export_query(opened, query, out, batch)


def export_folder(
    bundle: str | Path | Bundle,
    out: str | Path,
    batch: Batch | None = None,
    factories: Collection[str] = (),
    layout: Literal["flat", "triton"] = "flat",
) -> ExportedFolder:
    """Write every query's merged model as ONNX, beside one file of shared weights (models.export.export_folder)."""
    from gemel.models.export.export_folder import export_folder

    opened = open_bundle(bundle, factories) if isinstance(bundle, str | Path) else bundle
    return export_folder(opened, out, batch, layout)


def verify(bundle: str | Path, factories: Collection[str] = ()) -> list[str]:
    """Every problem of a bundle, one line each; empty for a sound bundle.

    Only models in `factories` are imported; the architecture of other models outside the zoo is not checked.
    """
    from gemel.models.bundle import verify_bundle

    return verify_bundle(bundle, factories, Path.cwd())


def inspect(
    workload: str | Path | Workload,
    signature: Literal["wide", "strict"] = "wide",
    weights: bool = False,
    onto: str | Path | None = None,
) -> Inspection:
    """Models, bytes, groups and the layer-sharing bound of a workload; needs neither weights nor footage.

    With the bundle `onto`, also what each query that is new for it would take there at least.
    """
    from gemel.inspection import inspect_workload

    return inspect_workload(_load(workload), signature, weights, onto)


def train(
    workload: str | Path | Workload,
    queries: Collection[str] | None = None,
    seed: int = 0,
    progress: ShownProgress = "auto",
    options: TrainOptions | None = None,
    resume: bool = False,
) -> list[TrainResult]:
    """Train the originals that have no weights yet, or those named, again (merger.training.originals)."""
    from gemel.merger import train_originals

    with _show(progress) as shown:
        return train_originals(_load(workload), queries, seed, shown, options, resume)


def merge(
    workload: str | Path | Workload,
    out: str | Path,
    method: str = "top-down",
    resume: bool = False,
    seed: int = 0,
    progress: ShownProgress = "auto",
    options: MergeOptions | None = None,
    overwrite: bool = False,
    onto: str | Path | None = None,
) -> MergeReport:
    """Merge a workload's models into one bundle at `out`, with the merge's log beside it (merger.merge).

    With `overwrite` a bundle that is there is replaced once the new one is whole. `onto` is a bundle whose queries keep
    every bit where the workload has them unchanged.
    """
    from gemel.merger import merge as merged

    with _show(progress) as shown, _replace(out, overwrite, resume):
        return merged(_load(workload), out, method, resume, seed, shown, options, onto)


def pack(
    files: Sequence[str | Path],
    out: str | Path,
    frames: str | Path | None = None,
    progress: ShownProgress = "auto",
    accept_unproven: bool = False,
    overwrite: bool = False,
) -> PackReport:
    """Put ONNX files into one bundle as they are, and measure it beside plain sessions of them (gemel.packing)."""
    from gemel.packing import pack as packed

    if isinstance(files, str | PathLike) or not files:
        raise InputError("the files", "are no list of paths, or none", "give a list: ['a.onnx', 'b.onnx']")
    with _show(progress) as shown, _replace(out, overwrite):
        return packed(files, out, frames, shown, accept_unproven)


def prove(
    bundle: str | Path,
    workload: str | Path | Workload,
    answers: str | Path | None = None,
    progress: ShownProgress = "auto",
) -> ProveResult:
    """What footage, a person's answers and labels prove of a bundle's queries; written beside it (gemel.prove)."""
    from gemel.proving import prove_bundle

    with _show(progress) as shown:
        return prove_bundle(bundle, _load(workload), answers, shown)


def plan(source: str | Path, conditions: Conditions = DEFAULT_CONDITIONS) -> BoxPlan:
    """Predict what a bundle, or a workload's originals, would do on a box (gemel.planner)."""
    from gemel.planner import plan_box

    return plan_box(source, conditions)


def place(
    fleet: str | Path,
    out: str | Path | None = None,
    objective: Objective = "boxes",
    shared: Shared = "predicted",
    min_frames: float = 0.0,
    before: str | Path | None = None,
    seed: int = 0,
) -> Placement:
    """Decide which queries of a fleet run on which box; with `out`, write `placement.json` and a workload for each box.

    Every box has time for `min_frames`, a fraction of its frames. `before` is the folder of the placement now, from
    which few bytes are moved. Raises InputError for a bad file.
    """
    from gemel.conditions import PlacementOptions
    from gemel.fleet import load_fleet
    from gemel.placement import find_placement, read_placement, reserve_folder

    load = load_fleet(fleet)
    if out is not None:
        reserve_folder(out, load)
    options = PlacementOptions(objective, shared, min_frames, seed)
    found = find_placement(load, options, read_placement(before) if before else None)
    if out is not None:
        found.write(out)
    return found


def simulate(
    source: str | Path, conditions: Conditions = DEFAULT_CONDITIONS, duration_s: float = 60.0
) -> SimulationResult:
    """Run the schedule of a bundle, or of a workload's originals, on a virtual clock (gemel.planner)."""
    from gemel.planner import simulate_box

    return simulate_box(source, conditions, duration_s)


def evaluate(
    bundle: str | Path,
    workload: str | Path | Workload,
    out: str | Path,
    device: str = DEFAULT_DEVICE,
    seeds: int = 3,
    progress: ShownProgress = "auto",
) -> Report:
    """Evaluate a bundle against its originals, offline and streaming; writes report.json and report.html into `out`."""
    from gemel.evaluation import EvalOptions
    from gemel.evaluation import evaluate as evaluated

    path = workload if isinstance(workload, str | Path) else workload.path
    with _show(progress) as shown:
        return evaluated(bundle, path, out, EvalOptions(device, seeds), shown)


def compare_reports(reports: Sequence[str | Path], out: str | Path) -> ReportComparison:
    """Compare several evaluations of one workload on a page (gemel.report.comparison).

    `reports` are report.json files, or folders of `gemel eval`. Raises InputError, with nothing written, where one is
    damaged or they are not of one workload.
    """
    from gemel.report.comparison import write_comparison

    if isinstance(reports, str | PathLike) or not reports:
        raise InputError("the reports", "are no list of paths, or none", "give a list of folders of `gemel eval`")
    return write_comparison(reports, out)


def check_drift(
    spool: str | Path,
    workload: str | Path | Workload,
    out: str | Path | None = None,
    bundle: str | Path | None = None,
    progress: ShownProgress = "auto",
) -> DriftCheck:
    """Compare a box's predictions with its originals' on sampled frames, and revert queries (gemel.drift)."""
    from gemel.drift import check_drift

    with _show(progress) as shown:
        return check_drift(spool, workload, out, bundle, shown)


def mend_drift(
    spool: str | Path,
    workload: str | Path | Workload,
    out: str | Path,
    bundle: str | Path | None = None,
    progress: ShownProgress = "auto",
) -> DriftMend:
    """Train norms and head of drifted queries on sampled frames, and write a bundle (gemel.drift_mend)."""
    from gemel.drift_mend import mend_drift

    with _show(progress) as shown:
        return mend_drift(spool, workload, out, bundle, shown)


def run(config: str | Path, check: bool = False, seconds: float | None = None) -> dict[str, Any]:
    """Run the box of a config until its cameras end, or for `seconds`; returns its summary with the ledger."""
    import math

    from gemel.edge_runtime.life.daemon import run as served

    return served(config, check=check, seconds=math.inf if seconds is None else seconds)


def _check_path(path: Any, what: str) -> Path:
    if not isinstance(path, str | PathLike):
        raise InputError(what, f"is {type(path).__name__}", "give the path of its file")
    return Path(path)


def _load(workload: str | Path | Workload) -> Workload:
    from gemel.models.workload import Workload, load_workload

    if isinstance(workload, Workload):
        return workload
    if not isinstance(workload, str | Path):
        problem = f"is {type(workload).__name__}"
        raise InputError("the workload", problem, "give the path of a workload file, or what load_workload returned")
    return load_workload(workload)


@contextmanager
def _show(progress: ShownProgress) -> Iterator[Progress]:
    """What to call with events; notes go to stderr as they come, unless the program has configured logging."""
    from gemel.models.notes import collect_notes, is_collecting
    from gemel.models.stages import silent
    from gemel.progress import is_notebook, print_note, show_progress

    is_shown = is_collecting() or bool(logging.getLogger().handlers)

    def show_note(note: str) -> None:
        if not is_shown:
            print_note(in_python(note), lambda line: print(line, file=sys.stderr))

    with collect_notes(show_note), ExitStack() as stack:
        if progress == "auto":
            has_bars = is_notebook() or (sys.stderr is not None and sys.stderr.isatty())
            progress = stack.enter_context(show_progress()) if has_bars else None
        yield progress or silent


@contextmanager
def _replace(out: str | Path, overwrite: bool, resume: bool = False) -> Iterator[None]:
    """Set aside the file at `out` while another is made, which it makes way for; it comes back where that fails."""
    path = Path(out)
    aside = path.with_name(f".{path.name}.before")
    if resume or not path.is_file():
        yield
        return
    if not overwrite:
        raise InputError(path, "exists already", "give overwrite=True, or choose another path")
    os.replace(path, aside)
    try:
        yield
    except BaseException:
        os.replace(aside, path)
        raise
    aside.unlink()
