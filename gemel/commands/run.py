"""`gemel run`, and `gemel reload` for what runs."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from edge_runtime.summary import empty_summary
from gemel.commands import grammar
from gemel.commands.outcome import BAD_INPUT, DONE, FELL_SHORT, Outcome
from gemel.commands.shown import Shown
from gemel.interrupts import Early
from models.process import use_one_arena

SETTLE_S = 0.3
PROGRAMS = ("gemel", "gemel/__main__.py")
"""What a process runs that was begun for a command: the script that is installed, or `python -m gemel`."""

_early = Early()


def register(commands: Any) -> None:
    """The grammar of both."""
    summary = "the edge daemon: cameras in, results out, under a memory budget"
    made = grammar.command(commands, "run", summary, run)
    made.add_argument("config", metavar="CONFIG")
    made.add_argument("--supervise", action="store_true", help="start the box again whenever it ends in an error")
    made.add_argument(
        "--check", action="store_true", help="check config and bundle, ask cameras and sinks for an answer, then stop"
    )
    made = grammar.command(commands, "reload", "let a running box take up its config and bundle as they are now", ask)
    made.add_argument("config", metavar="CONFIG", help="the config that the box was started with")


def begin(words: Sequence[str]) -> None:
    """What a process does first whose command line says these words.

    A box allocates from one heap. From then on until it listens itself, a box that is asked to stop ends at once.
    """
    if words[:1] != ["run"]:
        return
    begun = Path(getattr(sys.modules["__main__"], "__file__", None) or "")
    if any(begun.match(program) for program in PROGRAMS):
        use_one_arena()
    if "--check" not in words:
        _early.begin(partial(_unbegun, "--json" in words))


def _unbegun(as_json: bool, reason: str) -> tuple[str, str]:
    """What a box says that was asked to stop before it served."""
    return json.dumps(empty_summary(reason)) + "\n" if as_json else "", f"{reason} came before it began to serve\n"


def ask(args: argparse.Namespace) -> Outcome:
    """A box that refuses serves on as it is."""
    from gemel.reload import reload_box

    found = reload_box(args.config)
    if found["applied"]:
        return Outcome(found, f"{args.config}: applied", DONE)
    return Outcome(found, f"{args.config}: not applied, the box serves on as it is: {found['reason']}", FELL_SHORT)


def run(args: argparse.Namespace) -> Outcome:
    """What it did goes to stderr, since a sink may write its results to stdout."""
    if args.supervise and not args.check:
        return _supervised(args)
    from edge_runtime.daemon import run as run_box
    from gemel.box_text import box_text, checked_text

    _early.end()
    shown = Shown()
    shown.addFilter(lambda record: not record.getMessage().startswith("ledger: "))  # it is printed as a table
    logging.basicConfig(level=logging.INFO, handlers=[shown])
    try:
        summary = run_box(args.config, check=args.check)
    finally:
        shown.settle(SETTLE_S)
    if args.check:
        return Outcome(summary, checked_text(args.config, summary), aside=True, leaves=True)
    wrong = [*summary["unwritten"], *([summary["fault"]] if summary["fault"] else [])]
    text = "\n".join([box_text(summary), *(f"gemel: {line}" for line in wrong)])
    return Outcome(summary, text, _exit_code(summary), aside=True, leaves=True)


def _exit_code(summary: dict[str, Any]) -> int:
    """Whoever asks a box to stop has got what was asked for, however much hangs or could not be written; a camera in
    error is what fell short of one that ended by itself.
    """
    if summary["fault"]:
        return FELL_SHORT
    if summary["stopped_by"].startswith("SIG"):
        return DONE
    if summary["unwritten"]:
        return BAD_INPUT
    return FELL_SHORT if any(camera["error"] is not None for camera in summary["cameras"]) else DONE


def _supervised(args: argparse.Namespace) -> Outcome:
    """The box itself says what it did."""
    from gemel.supervising import supervise

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    asked = [*(["--json"] if args.json else []), "--", args.config]
    code = supervise([sys.executable, "-m", "gemel", "run", *asked])
    return Outcome({"exit_code": code}, "", code, aside=True)
