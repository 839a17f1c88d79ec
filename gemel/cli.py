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
from typing import Any, NoReturn, TextIO

from gemel.commands import bundle, demo, doctor, evaluate, inspect, merge, plan, run, service, train
from gemel.commands.outcome import BAD_INPUT, INTERRUPTED
from gemel.interrupts import Interrupts
from models.errors import GemelError, InputError, is_interrupt, one_line
from models.io import finite

MAX_TOLD = 300
MAX_CHARACTERS = 4095
"""Of one value on the command line: of a path, on the systems there are."""
FAMILIES = (demo, inspect, train, merge, bundle, run, service, evaluate, plan, doctor)


class _Parser(argparse.ArgumentParser):
    """Argparse, but a usage error is one line, as every other error here; nothing is empty, endless or given twice."""

    def __init__(self, *words: Any, **named: Any) -> None:
        super().__init__(*words, **named)
        self._given: set[str] = set()

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        if isinstance(action, argparse._StoreAction) and action.option_strings:
            if action.dest in self._given:
                raise argparse.ArgumentError(action, "is given twice")
            self._given.add(action.dest)
        return super()._get_values(action, arg_strings)

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        if not isinstance(action, argparse._SubParsersAction):
            if not arg_string:
                raise argparse.ArgumentError(action, "is empty")
            if len(arg_string) > MAX_CHARACTERS:
                raise argparse.ArgumentError(action, f"is longer than {MAX_CHARACTERS} characters")
        return super()._get_value(action, arg_string)

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {one_line(_clipped(message))}; see '{self.prog} --help'\n")


def _clipped(message: str) -> str:
    return message if len(message) <= MAX_TOLD else f"{message[:MAX_TOLD]}..."


def build_parser() -> argparse.ArgumentParser:
    """The whole grammar of the command line."""
    parser = _Parser(prog="gemel", description="Run more vision models on one edge box by sharing their weights.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for family in FAMILIES:
        family.register(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is returned, usage errors and --help leave through SystemExit.

    Without `argv` the process is this command's: interrupts are its own until the end.
    """
    interrupts = Interrupts()
    interrupts.begin()
    try:
        if argv is None:
            run.begin(sys.argv[1:])
        return _answer(argv, interrupts)
    except BaseException as error:
        if not (interrupts.came or is_interrupt(error)):
            raise
        interrupts.hold()
        code = _interrupted()
        if argv is None:
            interrupts.leave()
        return code
    finally:
        if argv is not None:
            interrupts.end()


def _answer(argv: Sequence[str] | None, interrupts: Interrupts) -> int:
    """Do what is asked; what was wrong with that is told, an interrupt comes through."""
    out = sys.stdout
    try:
        args = _parsed(argv, out)
        _check_folder()
        # A library that prints must not spoil the one JSON object.
        aside = contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext()
        with aside:
            outcome = args.does(args)
        if outcome.leaves and argv is None:
            interrupts.bound(outcome.exit_code)
        if outcome.silent:
            return outcome.exit_code
        text = json.dumps(finite(outcome.result), allow_nan=False) if args.json else outcome.text
        _print("" if outcome.aside and not args.json else text, out)
        if outcome.aside and not args.json:
            _print(text, sys.stderr)
        if outcome.leaves and argv is None:
            interrupts.leave(outcome.exit_code)
        return outcome.exit_code
    except (GemelError, OSError) as error:
        if interrupts.came or is_interrupt(error):
            raise
        return _complain(error if isinstance(error, GemelError) else _named(error), BAD_INPUT)
    except MemoryError:
        return _complain("this process may have no more memory; give it more (ulimit -v)", BAD_INPUT)
    except ImportError as error:  # a library that is missing, or that there is no memory for
        if interrupts.came or is_interrupt(error):
            raise
        return _complain(f"a library cannot be loaded: {error}", BAD_INPUT)


def _check_folder() -> None:
    """Libraries that are loaded later end the process, in words of their own, where the current folder is gone."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise InputError("the current folder", "was removed", "change to another") from None


def _parsed(argv: Sequence[str] | None, out: TextIO | None) -> argparse.Namespace:
    try:
        args = build_parser().parse_args(argv)
        for name, value in vars(args).items():
            for word in value if isinstance(value, list) else [value]:
                _check_word(name, word)
        return args
    except SystemExit:  # with help, which may not have come through yet
        _print("", out)
        raise


def _check_word(name: str, word: object) -> None:
    """Refuse what no argument can be, where one may be a path: nothing, a NUL, half a character."""
    if not isinstance(word, str):
        return
    try:
        sound = bool(word) and "\0" not in word and bool(os.fsencode(word))
    except UnicodeEncodeError:
        sound = False
    if not sound:
        raise InputError("gemel", f"{word!r} is nothing that could be given here", "leave it out, or correct it", name)


def _interrupted() -> int:
    """Tell it, once what was under way is gone: as a rule that is done, unless a second interrupt came between."""
    if atomic := sys.modules.get("models.io"):  # a command that did not import it has written nothing
        atomic.remove_temporaries()
    return _complain("interrupted", INTERRUPTED)


def _named(error: OSError) -> str:
    """What the system refused, and of what."""
    reason = error.strerror or error
    if error.filename:
        return str(InputError(os.fsdecode(error.filename), str(reason)))
    try:
        os.getcwd()
    except OSError as gone:
        return f"the current folder: {gone.strerror}; change to one that exists"
    return str(reason)


def _print(text: str, out: TextIO | None) -> None:
    if out is None:  # whoever started this process has closed it
        return
    lines = "\n".join(map(one_line, text.split("\n")))
    try:
        print(_writable(lines, out), end="\n" if text else "", file=out, flush=True)
    except BrokenPipeError:  # the reader (head, less) has seen enough: not an error of ours
        _give_up(out)
    except OSError as error:
        _give_up(out)
        name = "standard error" if out is sys.stderr else "standard output"
        raise OSError(error.errno, f"cannot be written: {error.strerror}", name) from error


def _give_up(out: TextIO) -> None:
    """Let what is left of this output go nowhere, Python's own writing at the end of the process included."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, out.fileno())
        os.close(nowhere)


def _writable(text: str, out: TextIO) -> str:
    """The text with what this terminal or file cannot take told by its escape."""
    encoding = getattr(out, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _complain(fault: object, exit_code: int) -> int:
    with contextlib.suppress(OSError):  # nobody can be told that nobody can be told
        _print(f"gemel: {fault}", sys.stderr)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
