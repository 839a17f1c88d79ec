"""`gemel train`."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from gemel.commands import grammar
from gemel.commands.outcome import Outcome
from gemel.text import duration, number, table


def register(commands: Any) -> None:
    """Its grammar."""
    made = grammar.command(commands, "train", "train the originals that have no weights yet", train)
    made.add_argument("workload", metavar="WORKLOAD")
    made.add_argument("--query", action="append", metavar="ID", help="only this query, trained again (may be repeated)")
    made.add_argument("--resume", action="store_true", help="go on where a training was interrupted")
    grammar.number(made, "--passes", grammar.whole(1, 10**12), "frames shown in the first cycle (default 4000)")
    grammar.number(made, "--rate", grammar.real(0, 10, open_below=True), "AdamW's peak learning rate (default 0.001)")
    made.add_argument(
        "--cycles",
        type=grammar.whole(1, 1000),
        dest="max_cycles",
        metavar="N",
        help="cycles of training at most (default 3)",
    )
    grammar.seed(made)


def train(args: argparse.Namespace) -> Outcome:
    """Trains and stores what has no weights."""
    from gemel.progress import show_progress
    from merger import TrainOptions, train_originals
    from models.workload import load_workload

    options = TrainOptions(**grammar.given(args, "passes", "rate", "max_cycles"))
    with show_progress() as progress:
        results = train_originals(load_workload(args.workload), args.query, args.seed, progress, options, args.resume)
    rows = [(one.id, one.metric, number(one.val), number(one.test), duration(one.seconds)) for one in results]
    text = table(("query", "metric", "val", "test", "time"), rows) if rows else "every query has its weights already"
    return Outcome({"queries": [asdict(one) for one in results]}, text)
