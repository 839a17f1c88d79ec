"""`gemel service`: a box as a service of the system."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from gemel.commands import grammar
from gemel.commands.outcome import Outcome
from models.errors import one_line


def register(commands: Any) -> None:
    """The grammar of its actions."""
    summary = "run a box as a service of the system"
    service = commands.add_parser("service", help=summary, description=f"{summary.capitalize()}.")
    actions = service.add_subparsers(dest="action", metavar="ACTION", required=True)
    made = grammar.command(actions, "install", "write the systemd unit that runs a box", install)
    made.add_argument("config", metavar="CONFIG", help="the box config")
    made.add_argument("-o", "--out", metavar="FILE", help="the unit (default /etc/systemd/system/gemel.service)")
    made.add_argument(
        "--user", metavar="NAME", help="whom it runs as (default the config's owner; for root's, a new user)"
    )
    made.add_argument("--environment", metavar="FILE", help="lines NAME=VALUE, for each ${NAME} of the config")


def install(args: argparse.Namespace) -> Outcome:
    """Nothing is started: the last line says how."""
    from edge_runtime.config import any_device, load_config
    from gemel.systemd import PLACE, install, variables_of

    path = Path(args.out) if args.out else PLACE
    environment = Path(args.environment) if args.environment else None
    variables = {} if environment is None else variables_of(environment)
    config = load_config(args.config, {**os.environ, **variables}, any_device)
    warnings = install(config, path, args.user, environment)
    then = f"systemctl daemon-reload && systemctl enable --now {path.name}"
    lines = [*(f"warning: {line}" for line in warnings), f"{path}: written; start it with: {then}"]
    return Outcome({"unit": str(path), "then": then, "warnings": warnings}, "\n".join(map(one_line, lines)))
