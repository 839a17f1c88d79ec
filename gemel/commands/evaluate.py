"""`gemel eval`, `gemel report` and `gemel drift check`: what a bundle is worth, before and while it serves."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from gemel.commands import grammar
from gemel.commands.outcome import DONE, FELL_SHORT, Outcome
from gemel.text import percent, size, table

MAX_WALL_S = 600


def register(commands: Any) -> None:
    """Its grammar."""
    summary = "offline and streaming accuracy of a bundle, with report.html and report.json"
    made = grammar.command(commands, "eval", summary, evaluate)
    made.add_argument("bundle", metavar="BUNDLE")
    made.add_argument("workload", metavar="WORKLOAD")
    made.add_argument("-o", "--out", required=True, metavar="DIR", help="folder of the report")
    grammar.device(made, more="; measured: what gemel profile found")
    made.add_argument(
        "--memory",
        default="min",
        metavar="M",
        help="what the box is to have: min, 50%%, 75%%, all (of what the originals need), or a size (default min)",
    )
    made.add_argument(
        "--wall",
        type=grammar.real(0, MAX_WALL_S),
        default=0.0,
        metavar="SECONDS",
        help="run the merged queries on this machine, too, for so long, and tell how far the virtual clock is off",
    )
    made.add_argument(
        "--fiftyone", metavar="DIR", help="a new folder for the test frames and both models' answers (COCO, FiftyOne)"
    )
    made.add_argument(
        "--seeds", type=grammar.whole(1, 1000), default=3, metavar="N", help="streams drawn and averaged (default 3)"
    )

    made = grammar.command(
        commands, "report", "several evaluations of one workload beside each other, as a page", report
    )
    made.add_argument("reports", metavar="REPORT", nargs="+", help="a report.json, or the folder of one")
    made.add_argument(
        "-o", "--out", required=True, metavar="FILE", help="the page, HTML; one that is there is replaced"
    )

    drift = commands.add_parser("drift", help=(told := "whether a box still answers as its originals would"),
                                 description=f"{told.capitalize()}.")  # fmt: skip
    actions = drift.add_subparsers(dest="action", metavar="ACTION", required=True)
    summary = "judge a box's answers by its originals, on the frames that it kept, and revert what fell"
    made = grammar.command(actions, "check", summary, check_drift)
    made.add_argument("spool", metavar="SPOOL", help="the folder that the box's config calls `spool`, or a copy of it")
    made.add_argument("workload", metavar="WORKLOAD")
    made.add_argument("-o", "--out", metavar="FILE", help="write a bundle in which what fell has its own weights again")
    made.add_argument(
        "--bundle", metavar="FILE", help="the bundle that the box ran (default what the ledger in SPOOL names)"
    )


def evaluate(args: argparse.Namespace) -> Outcome:
    """Falls short when a query misses its target on test."""
    from gemel.evaluation import REPORT_HTML, EvalOptions
    from gemel.evaluation import evaluate as evaluated
    from gemel.evaluation_text import conclusion_text, evaluation_text
    from gemel.progress import show_progress

    with show_progress() as progress:
        folder = None if args.fiftyone is None else Path(args.fiftyone)
        asked = EvalOptions(args.device or grammar.DEFAULT_DEVICE, args.seeds, args.memory, args.wall, folder)
        document = evaluated(args.bundle, args.workload, args.out, asked, progress)
    text = f"{evaluation_text(document)}\n\n{conclusion_text(document)}\nreport: {Path(args.out) / REPORT_HTML}"
    met = all(row["met"] for row in document["offline"])
    return Outcome(document, text, DONE if met else FELL_SHORT)


def report(args: argparse.Namespace) -> Outcome:
    """Nothing to fall short of: what each report found is in it."""
    from gemel.api import compare_reports

    found = compare_reports(args.reports, args.out)
    rows = [
        (one["letter"], one["bundle"], one["method"], size(one["bytes"]["after"]), f"{one['met']} of {one['of']}",
         percent(one["worst_ratio"]))
        for one in found["reports"]
    ]  # fmt: skip
    told = table(("", "bundle", "method", "bytes", "targets kept", "worst query"), rows)
    return Outcome(found, "\n".join([told, "", found["answer"], *found["differences"], f"report: {args.out}"]))


def check_drift(args: argparse.Namespace) -> Outcome:
    """Falls short when a query is below its target, certain or not."""
    from gemel.drift import check_drift, format_check
    from gemel.progress import show_progress

    with show_progress() as progress:
        found = check_drift(args.spool, args.workload, args.out, args.bundle, progress)
    met = all(row["ratio"] is None or row["ratio"] >= row["target"] for row in found["queries"])
    return Outcome(found, format_check(found), DONE if met else FELL_SHORT)
