"""`gemel inspect`."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from gemel.commands import grammar
from gemel.commands.outcome import Outcome
from models.errors import one_line


def register(commands: Any) -> None:
    """Its grammar."""
    summary = "models, bytes, groups of shareable layers and the ceiling of a workload"
    made = grammar.command(commands, "inspect", summary, inspect)
    made.add_argument("workload", metavar="WORKLOAD")
    made.add_argument("--weights", action="store_true", help="read the weights, and pair repeated layers by similarity")
    made.add_argument(
        "--signature",
        choices=("wide", "strict"),
        default="wide",
        help="what lets two layers share: weight shape alone, or every setting equal (the paper's)",
    )


def inspect(args: argparse.Namespace) -> Outcome:
    """Print what the models of a workload hold and could share."""
    from gemel.inspection import inspect_workload
    from models.workload import load_workload

    inspection = inspect_workload(load_workload(args.workload), args.signature, args.weights)
    for line in inspection.warnings:
        print(one_line(f"warning: {line}"), file=sys.stderr)
    return Outcome(inspection.to_json(), inspection.to_text())
