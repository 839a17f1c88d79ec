"""What all commands have: their result, options in tables, groups, and `--help` with what is registered by name."""

from __future__ import annotations

import inspect as introspection
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import typer
from typer import Option
from typer.core import TyperCommand

from gemel.models.plugins import GROUPS, describe_entries
from gemel.process import ExitCode


@dataclass(frozen=True)
class CommandResult:
    """What a command returns: JSON values, the same as text (printed to stderr if `on_stderr`), and its exit code.

    `leave_threads`: the process ends without waiting for its threads. `silent`: another rank prints the result.
    """

    data: dict[str, Any]
    text: str
    exit_code: int = ExitCode.DONE
    on_stderr: bool = False
    leave_threads: bool = False
    silent: bool = False


@dataclass(frozen=True)
class Invocation:
    """A parsed command line: `run` does the work, with torch or without, `as_json` prints its result as JSON."""

    run: Callable[[], CommandResult]
    as_json: bool
    uses_torch: bool = False
    name: str = ""


def parameter(name: str, annotation: Any, default: Any = None) -> introspection.Parameter:
    return introspection.Parameter(name, introspection.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


JSON_FLAG = parameter(
    "as_json", Annotated[bool, Option("--json", help="One JSON object on stdout, logs on stderr.")], False
)


def group(summary: str, parent: typer.Typer | None = None, name: str = "") -> typer.Typer:
    group = typer.Typer(
        name=name or None, help=summary, rich_markup_mode=None, add_completion=False, pretty_exceptions_enable=False,
        context_settings={"max_content_width": 100}, callback=lambda: None,
    )  # fmt: skip
    if parent is not None:
        parent.add_typer(group, name=name)
    return group


class HelpfulCommand(TyperCommand):
    """A command whose `--help` lists what is registered by name, a line each."""

    entries: tuple[str, ...] = ()

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        for group in self.entries:
            with formatter.section(f"Each {GROUPS[group]}"):
                formatter.write_dl(list(describe_entries(group)))


def command(
    group: typer.Typer,
    name: str,
    options: Sequence[introspection.Parameter] = (),
    uses_torch: bool = True,
    entries: Sequence[str] = (),
) -> Callable[[Callable[..., CommandResult]], Callable[..., CommandResult]]:
    """Register a function as a command with its own options, those of a table, and `--json`; it parses to Invocations.

    `uses_torch`: it needs all that gemel[merge] installs. `entries` are the groups of entry points that `--help` lists.
    """

    def register(function: Callable[..., CommandResult]) -> Callable[..., CommandResult]:
        def parse(as_json: bool, **given: Any) -> Invocation:
            return Invocation(partial(function, **given), as_json, uses_torch, f"gemel {group.info.name or ''} {name}")

        signature = introspection.signature(function, eval_str=True)
        plain = [part for part in signature.parameters.values() if part.kind is not introspection.Parameter.VAR_KEYWORD]
        parameters = [*plain, *options, JSON_FLAG]
        parse.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        parse.__annotations__ = {part.name: part.annotation for part in parameters}
        parse.__doc__ = function.__doc__
        group.command(name, cls=type("Command", (HelpfulCommand,), {"entries": tuple(entries)}))(parse)
        return function

    return register
