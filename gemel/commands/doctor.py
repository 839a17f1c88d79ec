"""`gemel doctor`."""

from __future__ import annotations

import argparse
from typing import Any

from gemel.commands import grammar
from gemel.commands.outcome import Outcome


def register(commands: Any) -> None:
    """Its grammar."""
    summary = "measure this machine: copy and storage bandwidth, engines available"
    made = grammar.command(commands, "doctor", summary, doctor)
    made.add_argument("--folder", metavar="DIR", help="where storage is measured (default: the system's temporary one)")


def doctor(args: argparse.Namespace) -> Outcome:
    """What this machine can do."""
    from gemel.doctor import diagnose

    found = diagnose(args.folder)
    return Outcome(found.to_json(), found.to_text())
