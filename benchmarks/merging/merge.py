"""Merges workloads by several arms and seeds, and compares what came of it.

Usage: python -m benchmarks.merging.merge [--arms top-down gemel ...] [--seeds 0 1 2] [--workloads gti junction cifar]
       [--targets 0.95 0.99] [--weights auto] [--max-flops 6e13] [--without "one network for all, trained"]; --summary
       only prints the tables of what is there

Every arm gets the same work (image passes x FLOPs), not the same time: on a machine that does other things too, time
would favour the arm that ran when it was idle.

Every merge leaves one JSON (its report, its log, options, machine and date) under OUT/NAME/ARM-seedN.json, where NAME
is the workload, with the target where that is not the workload's own, and with the width of the weights
and the stages of `top-down` that are switched off where asked for. What has its JSON is skipped and an interrupted
merge goes on from its checkpoint, so it can be interrupted and called again at any time. Bundles are kept beside the
cells only with `--keep`. It ends with the tables on stdout. `python -m benchmarks.results` writes docs/results.md from
what is kept below benchmarks/measured.
A workload is what `benchmarks/data/prepare.py` and `gemel train` left under out/real, or the path of a workload file.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

import yaml

import benchmarks.merging.rivals  # noqa: F401  (adds `ceiling` and `joint`)
from benchmarks.data.files import say
from benchmarks.machine import machine
from benchmarks.merging.cells import Cell, Weight, path_of, read_cells
from benchmarks.merging.tables import summary
from gemel.merger import METHODS, MergeOptions, Recipe, TopDownConfig, merge
from gemel.merger.checkpoint import WORK_SUFFIX
from gemel.merger.events import Change
from gemel.merger.merge import LOG_SUFFIX
from gemel.models.bits import AUTO_BITS, BITS_BY_OPTION, FP32
from gemel.models.errors import InputError
from gemel.models.files.io import open_atomic
from gemel.models.files.weights import fingerprint
from gemel.models.sharing.layers import layers_of_all
from gemel.models.workload import Workload, load_workload
from gemel.progress import show_progress

REPOSITORY = Path(__file__).resolve().parents[2]
ARMS = ("top-down", "gemel", "ceiling", "joint")
MAX_FLOPS = {"gti": 1e14, "junction": 3.8e14, "cifar": 1.6e14, "published": 6e13, "domains": 6e13, "elsewhere": 6e13}
"""What junction and cifar need, an epoch of which costs five and one and a half of gti's; what one core does in about a
quarter of an hour of the last three, set before they were merged for the first time."""
WORKLOADS = tuple(MAX_FLOPS)
STEPS = [change.value for change in Change]
BAD_INPUT, INTERRUPTED = 2, 130


@dataclass(frozen=True)
class Variant:
    """A workload at one target: `name` is that of its folder of cells, `own` whether the target is the file's."""

    name: str
    workload: Workload
    own: bool


def variant_of(workload: Workload, target: float | None) -> Variant:
    """The workload as it is, or a copy beside its file in which every query has this target."""
    if target is None or {query.accuracy_target for query in workload.queries} == {target}:
        return Variant(workload.name, workload, True)
    document = yaml.safe_load(workload.path.read_text(encoding="utf-8"))
    document["accuracy_target"] = target
    for query in document["queries"]:
        query.pop("accuracy_target", None)
    path = workload.path.with_name(f"{workload.path.stem}-{target:g}.yaml")
    with open_atomic(path, overwrite=True) as file:
        file.write(yaml.safe_dump(document, sort_keys=False, allow_unicode=True).encode())
    return Variant(f"{workload.name}-{target:g}", load_workload(path), False)


def workload_named(name: str) -> Workload:
    """A prepared workload by its name, or any by the path of its file."""
    given = Path(name)
    path = given if given.suffix in (".yaml", ".yml") else REPOSITORY / "out" / "real" / name / "workload.yaml"
    if not path.is_file():
        remedy = f"run `python -m benchmarks.data.prepare {name}`, then `gemel train` on what it writes"
        raise InputError("--workloads", f"there is no {path}", remedy)
    return load_workload(path)


def measure(variant: Variant, arm: str, seed: int, options: MergeOptions, out: Path, keep: bool = False) -> Cell:
    """The cell of one merge: read where it is finished, else merged, or merged to its end.

    Raises InputError where the cell was measured with other options, other originals or another workload file.
    """
    workload, path = variant.workload, path_of(out, variant.name, arm, seed)
    asked = {"options": json.loads(json.dumps(options.to_json())), "workload": _digest(workload)}
    if path.is_file():
        cell = Cell.read(path)
        if cell.asked != asked:
            changed = ", ".join(key for key in asked if asked[key] != cell.asked.get(key))
            raise InputError(path, f"was measured with another state of: {changed}", "remove it, or give another --out")
        say(f"[{variant.name}] {arm}, seed {seed}: already done")
        return cell
    say(f"[{variant.name}] {arm}, seed {seed}")
    path.parent.mkdir(parents=True, exist_ok=True)
    bundle = path.with_suffix(".bundle")
    log = bundle.with_name(bundle.name + LOG_SUFFIX)
    if not bundle.with_name(bundle.name + WORK_SUFFIX).is_dir():
        bundle.unlink(missing_ok=True)  # merged, but interrupted before its figures were kept
        log.unlink(missing_ok=True)
    began = time.process_time()
    with show_progress() as progress:
        report = merge(workload, bundle, arm, resume=True, seed=seed, progress=progress, options=options)
    rows = log.read_text(encoding="utf-8").splitlines() if log.is_file() else []
    result = {**report.to_json(), "bundle": bundle.name, "processor_s": time.process_time() - began}
    weights = tuple(Weight(layer.query, layer.path, layer.bytes) for layer in layers_of_all(workload.queries))
    cell = Cell(
        variant.name, workload.name, workload.accuracy_target, arm, seed, asked, machine(),
        datetime.now(timezone.utc).date().isoformat(), weights, result,
        tuple(json.loads(row) for row in rows),
    )  # fmt: skip
    cell.write(out)
    if not keep:
        bundle.unlink(missing_ok=True)
    log.unlink(missing_ok=True)
    return cell


def run(
    workloads: Sequence[Workload],
    targets: Sequence[float | None],
    arms: Sequence[str],
    seeds: Sequence[int],
    options: MergeOptions,
    out: Path,
    keep: bool = False,
) -> list[InputError]:
    """Every cell that is not there yet, a whole seed before the next one; returns what stood in the way of some.

    Where the options set no bound, each workload has its own.
    """
    off = [change.name.lower() for change in options.top_down.without]
    asked = "".join(f"-{name}" for name in ([options.weights] if options.weights != FP32 else []))
    asked += f"-without-{'-'.join(off)}" if off else ""
    variants = [variant_of(workload, target) for workload in workloads for target in targets]
    variants = [replace(one, name=one.name + asked, own=one.own and not asked) for one in variants]
    refused = []
    for seed, variant, arm in itertools.product(seeds, variants, arms):
        try:
            bound = options.max_flops or MAX_FLOPS.get(variant.workload.name)
            measure(variant, arm, seed, replace(options, max_flops=bound), out, keep)
        except InputError as error:
            say(f"error: {error}")
            refused.append(error)
    return refused


def _digest(workload: Workload) -> str:
    digest = hashlib.sha256(workload.path.read_bytes())
    for query in workload.queries:
        digest.update(fingerprint(query.weights))
    return digest.hexdigest()


def options_of(given: argparse.Namespace) -> MergeOptions:
    """The same bounds for every arm; a rate that is given is not searched for."""
    recipe = Recipe()
    for name in ("epochs", "frames_per_epoch", "rate"):
        if getattr(given, name) is not None:
            recipe = replace(recipe, **{name: getattr(given, name)})
    names = ("margin", "accept_unproven", "min_saving", "effort", "max_flops", "weights")
    budget = {name: getattr(given, name) for name in names if getattr(given, name) is not None}
    without = TopDownConfig(without=tuple(map(Change, given.without)))
    return MergeOptions(recipe, **budget, documents=given.weights == AUTO_BITS, top_down=without)


def main(arguments: list[str] | None = None) -> int:
    """The command; 0 done, 2 where some cell was refused, 130 interrupted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), help=f"methods of `gemel merge` (default: {ARMS})")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), help=f"default: {WORKLOADS}")
    parser.add_argument("--targets", nargs="+", type=float, default=[None], help="default: each workload's own")
    parser.add_argument("--max-flops", type=float, help=f"bound of one merge (default: {MAX_FLOPS})")
    parser.add_argument("--epochs", type=int, help="of one attempt, as in `gemel merge`")
    parser.add_argument("--frames-per-epoch", type=int)
    parser.add_argument("--rate", type=float, help="peak learning rate (default: the recipe's)")
    parser.add_argument("--margin", type=float)
    parser.add_argument("--accept-unproven", action="store_true", default=None, help="as in `gemel merge`")
    parser.add_argument("--min-saving", type=float)
    parser.add_argument("--effort", type=float, help="as in `gemel merge`")
    parser.add_argument("--weights", choices=BITS_BY_OPTION, default=FP32, help="as in `gemel merge`; default: fp32")
    parser.add_argument("--without", nargs="+", default=[], choices=STEPS, help="steps of `top-down` left out")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "out" / "merge", help="folder of the cells")
    parser.add_argument("--keep", action="store_true", help="keep the bundles, as ARM-seedN.bundle beside the cells")
    parser.add_argument("--summary", action="store_true", help="only print the tables of all cells that are there")
    given = parser.parse_args(arguments)
    refused: list[InputError] = []
    try:
        if not given.summary:
            if unknown := [arm for arm in given.arms if arm not in METHODS]:
                raise InputError("--arms", f"'{unknown[0]}' is unknown", f"choose of: {', '.join(METHODS)}")
            workloads = [workload_named(name) for name in given.workloads]
            refused = run(workloads, given.targets, given.arms, given.seeds, options_of(given), given.out, given.keep)
    except InputError as error:
        say(f"error: {error}")
        return BAD_INPUT
    except KeyboardInterrupt:
        say("interrupted; call it again to go on from here")
        return INTERRUPTED
    print(summary(read_cells(given.out)), end="")
    return BAD_INPUT if refused else 0


if __name__ == "__main__":
    sys.exit(main())
