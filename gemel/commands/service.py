"""`gemel service`: a box as a service of the system."""

from __future__ import annotations

import argparse
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
    made.add_argument("--user", metavar="NAME", help="whom it runs as (default a new user of the system's)")


def install(args: argparse.Namespace) -> Outcome:
    """Nothing is started: the last line says how."""
    from edge_runtime.config import any_device, load_config
    from gemel.unit import PLACE, install

    path = Path(args.out) if args.out else PLACE
    install(load_config(args.config, device_of=any_device), path, args.user)
    then = f"systemctl daemon-reload && systemctl enable --now {path.name}"
    return Outcome({"unit": str(path), "then": then}, one_line(f"{path}: written; start it with: {then}"))
