"""The words that commands have in common: how one is registered, and the options and kinds of values of several."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

from gemel.commands.outcome import Outcome
from gemel.planning.conditions import DEFAULT_DEVICE

Does = Callable[[argparse.Namespace], Outcome]


def command(commands: Any, name: str, summary: str, does: Does) -> argparse.ArgumentParser:
    """A command's own parser: its help, `--json`, and the function that is called with what was parsed."""
    made = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
    made.add_argument("--json", action="store_true", help="one JSON object on stdout, logs on stderr")
    made.set_defaults(does=does)
    return made


def given(args: argparse.Namespace, *words: str) -> dict[str, Any]:
    """Those of these options that stand on the command line."""
    return {word: value for word in words if (value := getattr(args, word)) is not None}


def seed(made: argparse.ArgumentParser) -> None:
    """`--seed`."""
    made.add_argument("--seed", type=int, default=0, help="seed of everything random (default 0)")


def number(made: argparse.ArgumentParser, name: str, kind: Callable[[str], Any], help: str) -> None:
    """An option whose value is a number."""
    made.add_argument(name, type=kind, metavar="N", help=help)


def device(made: argparse.ArgumentParser, default: str = DEFAULT_DEVICE, more: str = "") -> None:
    """`--device`, a profile of the virtual clock."""
    shown = f"device profile of the virtual clock (default {default}{more})"
    made.add_argument("--device", metavar="PROFILE", help=shown)


def factories(made: argparse.ArgumentParser) -> None:
    """`--factory`, which may be repeated."""
    made.add_argument(
        "--factory",
        action="append",
        default=[],
        metavar="MODULE:NAME",
        help="a model of your own in the bundle, from here or Python's path, to allow (may be repeated)",
    )


def at_least_one(text: str) -> int:
    """A whole number from 1 on."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return int(text)


def positive(text: str) -> float:
    """A finite number above 0."""
    if not 0 < float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return float(text)
