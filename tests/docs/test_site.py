"""The site of docs/: every page is in its menu, its reference has every command, and it builds with strict links."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from gemel.cli import command_tree
from tests.docs.pages import REPOSITORY

PAGES = REPOSITORY / "docs" / "generated_pages.py"


def load_hook() -> Any:
    spec = importlib.util.spec_from_file_location("generated_pages", PAGES)
    assert spec is not None and spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    return hook


def menu_pages() -> list[str]:
    menu = yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text())["nav"]
    parts = [part for section in menu for part in section.values()]
    return [page for part in parts for page in ([part] if isinstance(part, str) else part)]


def test_menu_has_every_page_once() -> None:
    hook = load_hook()
    generated = {"cli.md", "python.md", *hook.PAGES, *(f"{path.stem}.md" for path in hook.NOTEBOOKS)}
    pages = {path.name for path in (REPOSITORY / "docs").glob("*.md")} | generated
    assert sorted(menu_pages()) == sorted(pages)


def test_reference_has_every_command_with_its_options() -> None:
    text, commands = load_hook().describe_commands(), dict(load_hook()._walk(command_tree(), "gemel"))
    parts = dict(re.findall(r"^## (gemel .+)\n((?:(?!## ).*\n)*)", text, re.MULTILINE))
    assert parts.keys() == commands.keys() and "gemel bundle show" in commands
    for name, command in commands.items():
        for option in (one for one in command.params if one.param_type_name == "option" and "--json" not in one.opts):
            assert f"`{option.opts[0]}" in parts[name] and (option.help or "").split(".")[0][:20] in parts[name], name


@pytest.mark.exhaustive
def test_site_builds_with_strict_links(tmp_path: Path) -> None:
    mkdocs = REPOSITORY / "out" / "docs-venv" / "bin" / "mkdocs"
    command = [str(mkdocs)] if mkdocs.exists() else [sys.executable, "-m", "mkdocs"]
    if not mkdocs.exists() and not (importlib.util.find_spec("mkdocs") and importlib.util.find_spec("mkdocstrings")):
        pytest.skip("mkdocs-material is not installed: make docs")
    subprocess.run([*command, "build", "--quiet", "--site-dir", tmp_path / "site"], cwd=REPOSITORY, check=True)
    index = (tmp_path / "site" / "search" / "search_index.json").read_text()
    assert (
        "gemel pack" in index
        and (tmp_path / "site" / "llms.txt").read_text().count(".html): ") == len(menu_pages()) - 1
    )
    shutil.rmtree(tmp_path / "site")
