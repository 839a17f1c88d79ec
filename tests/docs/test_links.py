"""What the docs name is there: links and their anchors, files, commands with their options, benchmark modules."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from gemel.cli import command_tree
from tests.docs.pages import NAMES, PAGES, REPOSITORY, lines_of_code

ROOMS = "gemel|merger|edge_runtime|models|video_samples|benchmarks|tests|docs"
FILE = re.compile(rf"(?<![\w/.-])((?:{ROOMS})/[\w/.-]*\w\.(?:py|md|yaml|svg|png))\b")
FOLDER = re.compile(rf"(?<![\w/.-])((?:{ROOMS})/(?:\w+/)*)(?![\w*.])")


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        to = (page.parent / name).resolve() if name else page
        assert to.exists(), f"{target}: no such file"
        if anchor:
            assert anchor in anchors(to), f"{target}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_file_and_folder_that_is_named_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = set(FILE.findall(text)) | set(FOLDER.findall(text))
    missing = sorted(name for name in named if not (REPOSITORY / name).exists())
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_gemel_command_and_option_that_is_named_exists(page: Path) -> None:
    for line in lines_of_code(page):
        for command in re.split(r"&&|;|\|", line.partition("#")[0]):
            if command.split()[:1] == ["gemel"]:
                check_command(command)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_benchmark_that_is_named_is_a_module(page: Path) -> None:
    for name in set(re.findall(r"python -m (benchmarks[\w.]*\w)", page.read_text(encoding="utf-8"))):
        assert importlib.util.find_spec(name) is not None, name


def test_every_page_that_the_code_names_exists() -> None:
    sources = [path for room in ROOMS.split("|") for path in (REPOSITORY / room).rglob("*.py")]
    named = {
        (path.name, page) for path in sources for page in re.findall(r"\bdocs/[\w-]+\.md", path.read_text("utf-8"))
    }
    assert [one for one in sorted(named) if not (REPOSITORY / one[1]).is_file()] == []


def check_command(command: str) -> None:
    """Whether the command line knows the command and each of its options."""
    words = [word.strip("[],()") for word in command.split()[1:]]
    group = command_tree()
    while words and words[0] in getattr(group, "commands", {}):
        group = group.commands[words.pop(0)]
    if words and hasattr(group, "commands"):
        assert words[0].startswith("-"), f"{command}: no such command"
    known = {option for parameter in group.params for option in parameter.opts} | {"--help"}
    named = [word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)]
    assert set(named) <= known, f"{command}: no such option"


def anchors(page: Path) -> set[str]:
    """A heading's anchor: lower case, spaces as dashes, other signs left out."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
