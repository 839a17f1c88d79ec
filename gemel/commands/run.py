"""`gemel run`."""

from __future__ import annotations

import argparse
import logging
import sys
from typing import Any

from gemel.commands import grammar
from gemel.commands.outcome import BAD_INPUT, DONE, FELL_SHORT, INTERRUPTED, Outcome
from gemel.text import size
from models.errors import one_line


class OneLine(logging.Formatter):
    """Each record in a line, whatever stands in it; a traceback keeps its lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return one_line(super().formatMessage(record))


def register(commands: Any) -> None:
    """Its grammar."""
    summary = "the edge daemon: cameras in, results out, under a memory budget"
    made = grammar.command(commands, "run", summary, run)
    made.add_argument("config", metavar="CONFIG")
    made.add_argument("--supervise", action="store_true", help="start the box again whenever it ends in an error")
    made.add_argument(
        "--check", action="store_true", help="check config and bundle, ask the cameras for a frame, then stop"
    )


def run(args: argparse.Namespace) -> Outcome:
    """What it did goes to stderr, since a sink may write its results to stdout."""
    if args.supervise and not args.check:
        return _supervised(args)
    from edge_runtime.daemon import run as run_box
    from gemel.looking.box import box_text

    shown = logging.StreamHandler()
    shown.addFilter(lambda record: not record.getMessage().startswith("ledger: "))  # it is printed as a table
    shown.setFormatter(OneLine("%(asctime)s %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=logging.INFO, handlers=[shown])
    summary = run_box(args.config, check=args.check)
    if args.check:
        return Outcome(summary, f"{args.config}: {_sound(summary)}", aside=True)
    text = "\n".join([box_text(summary), *(f"gemel: {line}" for line in summary["unwritten"])])
    return Outcome(summary, text, _exit_code(summary), aside=True)


def _exit_code(summary: dict[str, Any]) -> int:
    """A camera in error is what fell short of a box that ended by itself; who stops one knows that it ends."""
    if summary["stopped_by"] == "SIGINT":
        return INTERRUPTED
    if summary["unwritten"]:
        return BAD_INPUT
    in_error = any(camera["error"] is not None for camera in summary["cameras"])
    return FELL_SHORT if in_error and summary["stopped_by"] != "SIGTERM" else DONE


def _supervised(args: argparse.Namespace) -> Outcome:
    """The box itself says what it did."""
    from gemel.supervising import supervise

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    asked = [*(["--json"] if args.json else []), "--", args.config]
    code = supervise([sys.executable, "-m", "gemel", "run", *asked])
    return Outcome({"exit_code": code}, "", code, aside=True)


def _sound(summary: dict[str, Any]) -> str:
    fits = "everything stays resident" if summary["fits"] else "queries take turns in memory"
    needs = f"{size(summary['weights_bytes'])} of weights, {size(summary['workspace_bytes'])} of workspace"
    copied = [f"; {query} copies {size(count)} in every run" for query, count in summary["overflow_bytes"].items()]
    return f"sound; {needs}, budget {size(summary['budget_bytes'])}: {fits}{''.join(copied)}"
