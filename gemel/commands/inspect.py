"""`gemel inspect`."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path
from typing import Any

from gemel.commands import grammar
from gemel.commands.outcome import Outcome
from models.errors import InputError, one_line
from models.io import read_bounded

MAX_PICTURE_BYTES = 2**24


def register(commands: Any) -> None:
    """Its grammar."""
    summary = "models, bytes, groups of shareable layers and the ceiling of a workload"
    made = grammar.command(commands, "inspect", summary, inspect)
    made.add_argument("workload", metavar="WORKLOAD", nargs="?")
    made.add_argument("--zoo", action="store_true", help="the zoo instead: what every pair of architectures shares")
    made.add_argument("--picture", metavar="FILE", help="with --zoo, the matrix as an SVG picture")
    made.add_argument("--weights", action="store_true", help="read the weights, and pair repeated layers by likeness")
    made.add_argument(
        "--signature",
        choices=("wide", "strict"),
        default="wide",
        help="what lets two layers share: weight shape alone, or every setting equal (the paper's)",
    )


def inspect(args: argparse.Namespace) -> Outcome:
    """A workload on paper, or the zoo."""
    if (args.workload is None) != args.zoo:
        raise InputError("gemel inspect", "wants a workload file or --zoo", "give one of the two", "WORKLOAD")
    if args.picture and not args.zoo:
        raise InputError("--picture", "shows the zoo's matrix", "give --zoo with it")
    if args.zoo:
        return _zoo(args)
    from gemel.looking.inspect import inspect_workload
    from models.workload import load_workload

    inspection = inspect_workload(load_workload(args.workload), args.signature, args.weights)
    for line in inspection.warnings:
        print(one_line(f"warning: {line}"), file=sys.stderr)
    return Outcome(inspection.to_json(), inspection.to_text())


def _zoo(args: argparse.Namespace) -> Outcome:
    from gemel.looking.zoo_matrix import zoo_matrix
    from models.io import open_atomic

    picture = _picture(args.picture) if args.picture else None
    matrix = zoo_matrix(args.signature)
    if picture is not None:
        with open_atomic(picture, overwrite=True) as file:
            file.write(matrix.to_svg().encode())
    return Outcome(matrix.to_json(), matrix.to_text())


def _picture(path: str) -> Path:
    """Where the picture may go: over another picture, and over nothing else."""
    from models.io import check_output

    picture = check_output(path, overwrite=True)
    if os.path.lexists(picture):
        with contextlib.suppress(InputError):
            if read_bounded(picture, MAX_PICTURE_BYTES, "").startswith(b"<svg"):
                return picture
        raise InputError(picture, "exists already and is no such picture", "move it away, or choose another path")
    return picture
