"""Pages of the site that are not in docs: references from the code, llms.txt, and files beside docs."""

from __future__ import annotations

import json
import os
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
REPOSITORY = DOCS.parent
PAGES = {"index.md": "README.md", "changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
"""Pages of the site that are files beside docs."""
NOTEBOOKS = sorted(DOCS.glob("*.ipynb"))
"""Tutorials, which tests execute; the site shows them as pages, and has the files."""
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
FILE_BLOCK = re.compile(r"^(```\w+) file=(\S+)$", re.MULTILINE)
"""A block that tests write into a file."""
HEADING = re.compile(r"^# (.+)$", re.MULTILINE)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are not in docs."""
    from mkdocs.structure.files import File

    texts = {"cli.md": describe_commands(), "python.md": describe_python()}
    texts |= {page: (REPOSITORY / source).read_text(encoding="utf-8") for page, source in PAGES.items()}
    texts |= {f"{path.stem}.md": describe_notebook(path) for path in NOTEBOOKS}
    for name, text in texts.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Lead links that leave docs to the pages and copies that the site has of these files; name files above blocks."""
    from mkdocs.structure.files import File

    source = PAGES.get(page.file.src_uri)
    folder = (REPOSITORY / source).parent if source else DOCS

    def move(found: re.Match[str]) -> str:
        target, sign, anchor = found[2].partition("#")
        path = Path(os.path.normpath(folder / target))
        if "://" in target or not target or not path.is_relative_to(REPOSITORY):
            return found[0]
        name = path.relative_to(REPOSITORY).as_posix()
        if path.is_relative_to(DOCS):
            name = path.relative_to(DOCS).as_posix()
        elif name in PAGES.values():
            name = next(page for page, source in PAGES.items() if source == name)
        elif path.is_dir():
            return found[0].replace(found[1] + found[2] + found[3], f"](#{anchor})" if anchor else "](index.md)")
        else:
            name = f"repository/{name}"
            if files.get_file_from_path(name) is None:
                files.append(File.generated(config, name, abs_src_path=str(path)))
        return f"{found[1]}{name}{sign}{anchor}{found[3]}"

    return FILE_BLOCK.sub(r'\1 title="\2"', LINK.sub(move, markdown))


def on_post_build(config: Any) -> None:
    """Write llms.txt: each page with its title and its first sentence."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    for section in config.nav:
        (title, pages), *_ = section.items()
        if isinstance(pages, list):
            lines += [f"## {title}", "", *map(_describe_page, pages), ""]
    Path(config.site_dir, "llms.txt").write_text("\n".join(lines), encoding="utf-8")


def _describe_page(name: str) -> str:
    texts = {"cli.md": describe_commands, "python.md": describe_python}
    texts |= {f"{one.stem}.md": partial(describe_notebook, one) for one in NOTEBOOKS}
    path = REPOSITORY / PAGES[name] if name in PAGES else DOCS / name
    text = texts[name]() if name in texts else path.read_text(encoding="utf-8")
    heading = HEADING.search(text)
    title = heading[1] if heading else name
    rest = text[heading.end() :] if heading else text
    first = next(
        (" ".join(part.split()) for part in rest.split("\n\n") if re.match(r"(?!```)[A-Z`\[]", part.strip())), ""
    )
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.split(r"(?<=[a-z`)])\. ", first)[0])
    return f"- [{title}]({name.removesuffix('.md')}.html): {plain[:200].rstrip('.:') or title}."


def describe_notebook(path: Path) -> str:
    """A notebook as Markdown: its text and its code, without outputs, and a link to the file below the title."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    texts = {"markdown": "{}", "code": "```python\n{}\n```"}
    parts = [texts[cell["cell_type"]].format("".join(cell["source"])) for cell in cells]
    title, *rest = parts[0].split("\n", 1)
    return "\n\n".join([title, f"[This page as a notebook]({path.name})", *(part.strip() for part in rest), *parts[1:]])


def describe_commands() -> str:
    """The reference of the command line, from its parsers."""
    sys.path.insert(0, str(REPOSITORY))
    from gemel.cli import command_tree
    from gemel.models.plugins import GROUPS, describe_entries

    lines = [
        "# Command line", "",
        "Every command takes `--help` and `--json`: one JSON object on stdout, logs on stderr. [Exit codes](guide.md).",
    ]  # fmt: skip
    for name, command in _walk(command_tree(), "gemel"):
        arguments = [one for one in command.params if one.param_type_name == "argument"]
        options = [one for one in command.params if one.param_type_name == "option" and "--json" not in one.opts]
        usage = " ".join([name, *(one.metavar or one.name for one in arguments), "[options]"])
        lines += ["", f"## {name}", "", (command.help or "").strip(), "", f"    {usage}", ""]
        rows = [(one.metavar or one.name, one.help or "") for one in arguments]
        rows += [(_flags(one), one.help or "") for one in options]
        if rows:
            lines += ["| option | meaning |", "| --- | --- |"]
            lines += [f"| `{flag.replace('|', chr(92) + '|')}` | {_cell(text)} |" for flag, text in rows]
        for group in command.entries:
            lines += ["", f"| {GROUPS[group]} | |", "| --- | --- |"]
            lines += [f"| `{entry}` | {_cell(text)} |" for entry, text in describe_entries(group)]
    return "\n".join(lines) + "\n"


def _walk(command: Any, name: str) -> Any:
    """All commands below one, each with its whole name."""
    for key, one in command.commands.items():
        if hasattr(one, "commands"):
            yield from _walk(one, f"{name} {key}")
        else:
            yield f"{name} {key}", one


def _flags(option: Any) -> str:
    flags = ", ".join([*option.opts, *option.secondary_opts])
    return flags if option.is_flag else f"{flags} {option.metavar or 'VALUE'}"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def describe_python() -> str:
    """The page from which mkdocstrings makes Python's reference."""
    modules = {
        "gemel.api": "", "gemel.conditions.Conditions": "", "gemel.merger.config.MergeOptions": "",
        "gemel.models.preprocess.Preprocess": "", "gemel.models.workload.Workload": "",
        "gemel.models.workload.Query": "", "gemel.models.errors": "", "gemel.testing": "",
    }  # fmt: skip
    head = "# Python\n\nAll of it is `import gemel`; [the guide](guide.md#python) has examples.\n"
    return head + "".join(f"\n::: {name}\n" for name in modules)
