"""`gemel eval`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from gemel.commands import grammar
from gemel.commands.outcome import DONE, FELL_SHORT, Outcome


def register(commands: Any) -> None:
    """Its grammar."""
    summary = "offline and streaming accuracy of a bundle, with report.html and report.json"
    made = grammar.command(commands, "eval", summary, evaluate)
    made.add_argument("bundle", metavar="BUNDLE")
    made.add_argument("workload", metavar="WORKLOAD")
    made.add_argument("-o", "--out", required=True, metavar="DIR", help="folder of the report")
    grammar.device(made)
    made.add_argument(
        "--memory",
        default="min",
        metavar="M",
        help="what the box is to have: min, 50%%, 75%%, all (of what the originals need), or a size (default min)",
    )
    made.add_argument(
        "--seeds", type=grammar.whole(1, 1000), default=3, metavar="N", help="streams drawn and averaged (default 3)"
    )


def evaluate(args: argparse.Namespace) -> Outcome:
    """Falls short when a query misses its target on test."""
    from gemel.evaluation.evaluating import REPORT_HTML
    from gemel.evaluation.evaluating import evaluate as evaluated
    from gemel.evaluation.summary import evaluation_text, verdict_text
    from gemel.progress import shown_on

    with shown_on() as progress:
        device = args.device or grammar.DEFAULT_DEVICE
        document = evaluated(args.bundle, args.workload, args.out, device, args.seeds, progress, args.memory)
    text = f"{evaluation_text(document)}\n\n{verdict_text(document)}\nreport: {Path(args.out) / REPORT_HTML}"
    met = all(row["met"] for row in document["offline"])
    return Outcome(document, text, DONE if met else FELL_SHORT)
