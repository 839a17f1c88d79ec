"""The command line: parses a command, runs it, prints its result, and turns errors into one line and an exit code."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any, TextIO

import typer

from gemel import bundle_commands as _bundle_commands  # noqa: F401  (registers its commands)
from gemel import proof_commands as _proof_commands  # noqa: F401  (registers its commands)
from gemel.commands import app, prepare_process
from gemel.invocation import Invocation
from gemel.models.errors import GemelError, InputError, is_interrupt, one_line
from gemel.models.files.extras import require_merge
from gemel.models.notes import collect_notes
from gemel.models.process import import_torch
from gemel.process import ExitCode, LogHandler, SignalHandlers, exit_soon
from gemel.progress import print_note

_UsageError: Any = typer.BadParameter.__base__
"""Typer's UsageError, which has no public name: releases differ in where they keep their copy of Click."""
MAX_USAGE_CHARS = 300


def command_tree() -> Any:
    """All commands with their options, as Click objects."""
    return typer.main.get_command(app)


def parse_command(words: Sequence[str]) -> Invocation | int | None:
    """The command of these words with its options, not run yet; the exit code of --help, which is printed."""
    try:
        return command_tree().main(list(words), prog_name="gemel", standalone_mode=False)
    except typer.Exit as done:
        return done.exit_code


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; without `argv` the arguments and signals of this process are used."""
    signals, owns_process = SignalHandlers(), argv is None
    signals.install()
    words = sys.argv[1:] if argv is None else argv
    try:
        if owns_process:
            prepare_process(words)
        return _run(words, signals, owns_process)
    except BaseException as error:
        if not (signals.interrupted or is_interrupt(error)):
            raise
        signals.ignore()
        if io := sys.modules.get("gemel.models.files.io"):  # a command that did not import it has written nothing
            io.remove_temporaries()  # a second interrupt may have left some
        code = _report("interrupted", ExitCode.INTERRUPTED)
        if owns_process:
            signals.exit(code)
        return code
    finally:
        if not owns_process:
            signals.restore()


def _run(words: Sequence[str], signals: SignalHandlers, owns_process: bool) -> int:
    out = sys.stdout
    try:
        invocation = parse_command(words)
        if not isinstance(invocation, Invocation):  # --help was printed
            _print("", out)
            return invocation or ExitCode.DONE
        _check_current_folder()
        # What libraries print must not get into the one JSON object.
        with (
            contextlib.redirect_stdout(sys.stderr) if invocation.as_json else contextlib.nullcontext(),
            collect_notes(_print_note) as notes,
        ):
            if invocation.uses_torch:
                require_merge(" ".join(invocation.name.split()))
                import_torch()
            result = invocation.run()
        if result.leave_threads and owns_process:
            exit_soon(result.exit_code)
        if invocation.as_json and not result.silent:
            from gemel.models.files.io import finite

            all_notes = list(dict.fromkeys([*result.data.get("notes", ()), *notes]))
            data = {**result.data, "notes": all_notes} if all_notes else result.data
            _print(json.dumps(finite(data), allow_nan=False), out)
        elif not result.silent:
            _print(result.text, sys.stderr if result.on_stderr else out)
        if result.leave_threads and owns_process:
            signals.exit(result.exit_code)
        return result.exit_code
    except _UsageError as error:
        name = error.ctx.command_path if error.ctx else "gemel"
        message = one_line(error.format_message())
        shown = message if len(message) <= MAX_USAGE_CHARS else f"{message[:MAX_USAGE_CHARS]}..."
        return _report(f"{shown}; see '{name} --help'", ExitCode.BAD_INPUT, name)
    except (GemelError, OSError, MemoryError, ImportError) as error:
        if signals.interrupted or is_interrupt(error):
            raise
        for line in (_describe(error), *map(str, getattr(error, "others", ()))):
            _report(line, ExitCode.BAD_INPUT)
        return ExitCode.BAD_INPUT


def _check_current_folder() -> None:
    """Libraries that are imported later end the process where the current folder is gone."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise InputError("the current folder", "was removed", "change to another") from None


def _print_note(note: str) -> None:
    """A command that writes a log has it there; of torchrun's processes the first prints."""
    if os.environ.get("RANK", "0") == "0" and not any(
        isinstance(handler, LogHandler) for handler in logging.getLogger().handlers
    ):
        print_note(note, lambda line: _print(line, sys.stderr))


def _describe(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return "this process may have no more memory; give it more (ulimit -v)"
    if isinstance(error, ImportError):
        return f"a library cannot be loaded: {error}"
    if not isinstance(error, OSError):
        return str(error)
    reason = error.strerror or str(error)
    return str(InputError(os.fsdecode(error.filename), reason)) if error.filename else reason


def _report(problem: str, code: int, command: str = "gemel") -> int:
    with contextlib.suppress(OSError):  # stderr is closed
        _print(f"{command}: {one_line(problem)}", sys.stderr)
    return code


def _print(text: str, out: TextIO | None) -> None:
    """Print and flush; characters that the terminal's encoding lacks become escapes."""
    if out is None:  # the parent process closed it
        return
    encoding = getattr(out, "encoding", None) or "utf-8"
    lines = "\n".join(map(one_line, text.split("\n"))).encode(encoding, "backslashreplace").decode(encoding)
    try:
        print(lines, end="\n" if text else "", file=out, flush=True)
    except OSError as error:
        with contextlib.suppress(OSError, ValueError):  # what is left goes to /dev/null, Python's flush at exit too
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, out.fileno())
            os.close(null)
        if isinstance(error, BrokenPipeError):  # the reader (head, less) has closed the pipe
            return
        name = "standard error" if out is sys.stderr else "standard output"
        raise OSError(error.errno, f"cannot be written: {error.strerror}", name) from error
