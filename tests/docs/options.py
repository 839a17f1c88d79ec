"""Writes the option table of docs/guide.md from the command line: python -m tests.docs.options."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from gemel.cli import command_tree
from tests.docs.pages import REPOSITORY

GUIDE = REPOSITORY / "docs" / "guide.md"
TABLE = re.compile(r"(?<=A test compares them\.\n\n).*?(?=\n\n## Never run)", re.DOTALL)
EVERYWHERE = {"--json", "--help"}


def render_options() -> str:
    """A row for each command: its arguments, and its options with their values."""
    rows = ["| command | options |", "| --- | --- |"]
    for words, command in find_commands(command_tree()):
        arguments = [str(one.metavar).replace("|", "\\|") for one in command.params if not one.opts[0].startswith("-")]
        options = [one for one in command.params if one.opts[0].startswith("-") and one.opts[-1] not in EVERYWHERE]
        rows.append(f"| `{' '.join([*words, *arguments])}` | {', '.join(map(render_option, options))} |")
    return "\n".join(rows)


def render_option(option: Any) -> str:
    value = f" {option.metavar}" if option.metavar else ""
    return f"`{option.opts[0]}{value}`".replace("|", "\\|")


def find_commands(group: Any, words: tuple[str, ...] = ("gemel",)) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command with the words that call it."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from find_commands(command, (*words, name))
        else:
            yield (*words, name), command


if __name__ == "__main__":
    GUIDE.write_text(TABLE.sub(lambda _: render_options(), GUIDE.read_text(encoding="utf-8")))
