"""Writes the lists of docs/files.md from tests/files_table.csv: python -m tests.docs.files."""

from __future__ import annotations

import ast
import csv
import io
import re
from functools import cache

from tests.docs.pages import REPOSITORY

PAGE = REPOSITORY / "docs" / "files.md"
ROWS = REPOSITORY / "tests" / "files_table.csv"
COLUMNS = ["input", "what happens", "test"]
KIND = re.compile(r"(?:([\w ]+): )?(.+)")
SELF_EXPLAINING = re.compile(r"^(?:refused|read|played)\b|\bnoted?\b|no evidence|\bnamed\b|with a line of the log")
TABLE = re.compile(r"(?<=<!-- table: files -->\n).*?(?=\n<!-- end -->)", re.DOTALL)


def read_rows() -> list[dict[str, str]]:
    """The rows of the CSV file, sorted by input."""
    reader = csv.DictReader(io.StringIO(ROWS.read_text(encoding="utf-8")))
    assert reader.fieldnames == COLUMNS
    return sorted(reader, key=lambda row: row["input"].casefold())


def render_files() -> str:
    """What happens in silence, by kind of input; refusals, notes and files read as they are explain themselves."""
    sections: dict[str, list[str]] = {}
    for row in read_rows():
        if not SELF_EXPLAINING.search(row["what happens"]):
            kind, case = KIND.fullmatch(row["input"]).groups()  # pyright: ignore[reportOptionalMemberAccess]
            sections.setdefault(kind or "Other", []).append(f"- {case} → {row['what happens']}")
    return "\n\n".join("\n".join([f"### {kind}", "", *lines]) for kind, lines in sections.items())


@cache
def find_tests(path: str) -> frozenset[str]:
    """Names of the test functions that a file defines; empty without the file."""
    if not (REPOSITORY / path).is_file():
        return frozenset()
    nodes = ast.walk(ast.parse((REPOSITORY / path).read_text(encoding="utf-8")))
    names = (node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return frozenset(name for name in names if name.startswith("test_"))


def format_rows() -> str:
    """The CSV file with its rows sorted."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(read_rows())
    return text.getvalue()


if __name__ == "__main__":
    ROWS.write_text(format_rows(), encoding="utf-8")
    PAGE.write_text(TABLE.sub(lambda _: render_files(), PAGE.read_text(encoding="utf-8")), encoding="utf-8")
