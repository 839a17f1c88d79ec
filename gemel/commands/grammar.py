"""The words that commands have in common: how one is registered, and the options and kinds of values of several."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from typing import Any

from gemel.commands.outcome import Outcome
from gemel.conditions import DEFAULT_DEVICE

MAX_DIGITS = 40
MAX_SEED = 2**32 - 1
FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
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
    made.add_argument(
        "--seed", type=whole(0, MAX_SEED), default=0, metavar="N", help="seed of everything random (default 0)"
    )


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
        type=_factory,
        default=[],
        metavar="MODULE:NAME",
        help="a model of your own in the bundle, from here or Python's path, to allow (may be repeated)",
    )


def whole(least: int, most: int) -> Callable[[str], int]:
    """The kind of a whole number between these, both included."""

    def kind(text: str) -> int:
        try:
            value = int(text) if len(text) <= MAX_DIGITS else most + 1
        except ValueError:
            value = most + 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"'{_clipped(text)}' is no whole number from {least} to {most}")
        return value

    return kind


def real(least: float, most: float, open_below: bool = False) -> Callable[[str], float]:
    """The kind of a finite number between these, both included; with `open_below` it is above the least."""

    def kind(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most or (open_below and value == least):
            bounds = f"above {least:g} and at most {most:g}" if open_below else f"from {least:g} to {most:g}"
            raise argparse.ArgumentTypeError(f"'{_clipped(text)}' is no number {bounds}")
        return value

    return kind


def _clipped(text: str) -> str:
    return text if len(text) <= MAX_DIGITS else f"{text[:MAX_DIGITS]}..."


def _factory(text: str) -> str:
    if not FACTORY.fullmatch(text):
        raise argparse.ArgumentTypeError(f"'{_clipped(text)}' is not written as MODULE:NAME")
    return text
