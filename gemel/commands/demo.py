"""`gemel demo`."""

from __future__ import annotations

import argparse
from typing import Any

from gemel.commands import grammar
from gemel.commands.outcome import DONE, FELL_SHORT, Outcome
from gemel.conditions import DEMO_DEVICE


def register(commands: Any) -> None:
    """Its grammar."""
    made = grammar.command(commands, "demo", "the whole road on rendered camera clips: train, merge, run, report", demo)
    made.add_argument("--out", default="gemel-demo", metavar="DIR", help="where everything goes (default gemel-demo)")
    grammar.device(made, DEMO_DEVICE)
    grammar.seed(made)


def demo(args: argparse.Namespace) -> Outcome:
    """Falls short when a query misses its target on test."""
    from gemel.demo import run_demo
    from gemel.progress import show_progress

    with show_progress() as progress:
        result = run_demo(args.out, args.device or DEMO_DEVICE, args.seed, progress)
    return Outcome(result.to_json(), result.to_text(), DONE if result.met else FELL_SHORT)
