"""`gemel merge`."""

from __future__ import annotations

import argparse
from typing import Any

from gemel.commands import grammar
from gemel.commands.outcome import DONE, FELL_SHORT, Outcome
from gemel.text import duration, percent, size
from models.bits import WEIGHTS

METHODS = (
    "top-down", "gemel", "earliest", "latest", "random", "one-model", "mainstream", "ceiling", "joint", "none",
)  # fmt: skip
SHARING_NOTHING = ("joint", "none")
RECIPE = ("epochs", "frames_per_epoch", "rate", "batch", "distill", "features")
BOUNDS = ("margin", "min_saving", "max_minutes", "max_flops", "precision", "weights")


def register(commands: Any) -> None:
    """Its grammar."""
    summary = "share weights between the queries' models and write a bundle"
    made = grammar.command(commands, "merge", summary, merge)
    made.add_argument("workload", metavar="WORKLOAD")
    made.add_argument("-o", "--out", required=True, metavar="FILE", help="the bundle to write")
    shown = f"{METHODS[0]} (default), {', '.join(METHODS[1:])}"
    made.add_argument("--method", default=METHODS[0], metavar="M", help=shown)
    made.add_argument("--resume", action="store_true", help="go on where a merge to the same file was interrupted")
    _training(made)
    made.add_argument(
        "--weights",
        choices=WEIGHTS,
        help="the fewest bits in which weights are stored and resident, as far as every query bears it (default fp32)",
    )
    _budget(made)
    grammar.seed(made)


def _training(made: argparse.ArgumentParser) -> None:
    number, real, whole = grammar.number, grammar.real, grammar.whole
    number(made, "--epochs", whole(1, 10**6), "epochs of one attempt at most (default 4)")
    number(made, "--frames-per-epoch", whole(1, 10**9), "frames of a query in one epoch at most (default 512)")
    number(made, "--batch", whole(1, 2**16), "frames of a query in one step (default 16)")
    number(made, "--rate", real(0, 10, open_below=True), "AdamW's peak learning rate (default: chosen on val)")
    number(made, "--distill", real(0, 1), "weight of the originals' outputs against the labels, 0 to 1 (default 0.5)")
    number(made, "--features", real(0, 10**6), "weight of the features before the heads (default: the method's own)")
    made.add_argument(
        "--precision", choices=("auto", "fp32", "tf32", "bf16"), help="of the training (default: measured)"
    )
    number(
        made, "--margin", real(0, 1), "how far above its target a query must come on val, 0 to 1 (default: an interval)"
    )


def _budget(made: argparse.ArgumentParser) -> None:
    number, real, whole = grammar.number, grammar.real, grammar.whole
    number(made, "--min-saving", real(0, 1), "leave out groups that save less than this part of all bytes (default 0)")
    number(made, "--max-minutes", real(0, 10**7), "begin nothing more after this time (default: no limit)")
    number(
        made,
        "--max-flops",
        real(0, 1e30),
        "begin nothing more after so many FLOPs (default: no limit)",
    )
    number(made, "--threads", whole(1, 4096), "of each training: then the bundle is the same with or without --ray")
    made.add_argument("--ray", metavar="ADDRESS", help="a Ray cluster to use: local, auto, HOST:PORT or ray://...")


def merge(args: argparse.Namespace) -> Outcome:
    """Falls short when a query misses its target on test."""
    from gemel.analytic_costs import remember
    from gemel.evaluation_text import scores_text
    from gemel.merge_outcomes import MergeOutcomes
    from gemel.progress import show_progress
    from merger import MergeOptions, Recipe, Resources
    from merger import merge as merge_workload
    from merger.distributed import process_group
    from models.bundle import open_bundle
    from models.workload import load_workload

    recipe = Recipe(**grammar.given(args, *RECIPE))
    budget = grammar.given(args, *BOUNDS)
    workload = load_workload(args.workload)
    with process_group() as crew, show_progress() as progress:
        resources = Resources(args.threads, args.ray, crew)
        options = MergeOptions(recipe, args.rate is None, resources=resources, **budget)
        report = merge_workload(workload, args.out, args.method, args.resume, args.seed, progress, options)
        if crew.rank:
            return Outcome({}, "", DONE if report.met else FELL_SHORT, silent=True)
    remember(report.bundle)
    result = report.to_json()
    became = f"{size(report.bytes_before)} became {size(report.bytes_after)}"
    saved = f"{percent(report.saved_fraction)} saved (ceiling {percent(report.ceiling_fraction)})"
    text = f"{scores_text(result['queries'])}\n\n{report.bundle}: {became}, {saved}, in {duration(report.seconds)}"
    if args.method not in SHARING_NOTHING and (why := MergeOutcomes.of(open_bundle(report.bundle)).why_nothing()):
        text += f"\n{why}"
    return Outcome(result, text, DONE if report.met else FELL_SHORT)
