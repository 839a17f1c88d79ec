"""The command line: puts the commands' grammars together, prints how one came out, and makes errors exit codes.

Exit codes: 0 done, 1 ran but the result falls short, 2 bad input, 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from typing import NoReturn, TextIO

from gemel.commands import bundle, demo, doctor, evaluate, inspect, merge, plan, run, train
from gemel.commands.outcome import BAD_INPUT, INTERRUPTED
from gemel.text import finite
from models.errors import GemelError, one_line

FAMILIES = (demo, inspect, train, merge, bundle, run, evaluate, plan, doctor)


class _Parser(argparse.ArgumentParser):
    """Argparse, but a usage error is one line, as every other error here."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {one_line(message)}; see '{self.prog} --help'\n")


def build_parser() -> argparse.ArgumentParser:
    """The whole grammar of the command line."""
    parser = _Parser(prog="gemel", description="Run more vision models on one edge box by sharing their weights.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for family in FAMILIES:
        family.register(commands)
    return parser


def _print(text: str, out: TextIO) -> None:
    lines = "\n".join(map(one_line, text.split("\n")))
    try:
        print(_writable(lines, out), file=out, flush=True)
    except BrokenPipeError:  # the reader (head, less) has seen enough: not an error of ours
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())


def _writable(text: str, out: TextIO) -> str:
    """The text with what this terminal or file cannot take told by its escape."""
    encoding = getattr(out, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is returned, usage errors and --help leave through SystemExit."""
    out = sys.stdout
    try:
        args = build_parser().parse_args(argv)
        # A library that prints must not spoil the one JSON object.
        aside = contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext()
        with aside:
            outcome = args.does(args)
        if args.json:
            _print(json.dumps(finite(outcome.result), allow_nan=False), out)
        else:
            _print(outcome.text, sys.stderr if outcome.aside else out)
        return outcome.exit_code
    except GemelError as error:
        return _complain(error, error.exit_code)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _complain(f"{where}{error.strerror or error}", BAD_INPUT)
    except KeyboardInterrupt:
        return _complain("interrupted", INTERRUPTED)


def _complain(fault: object, exit_code: int) -> int:
    print(_writable(f"gemel: {one_line(fault)}", sys.stderr), file=sys.stderr)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
