"""The pages that users read."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [
        *REPOSITORY.glob("*.md"),
        *(REPOSITORY / "docs").glob("*.md"),
        *(REPOSITORY / "benchmarks").rglob("*.md"),
    ]
)
NAMES = [str(page.relative_to(REPOSITORY)) for page in PAGES]
FENCED = re.compile(r"```.*?```", re.DOTALL)
INLINE = re.compile(r"`([^`]+)`")
INDENTED = re.compile(r"^ {4,}(?![-*|\d] )(\S.*)$", re.MULTILINE)


def lines_of_code(page: Path) -> list[str]:
    """All that a page shows as code, fenced, indented and inline, line by line."""
    text = page.read_text(encoding="utf-8")
    fenced = [line for block in FENCED.findall(text) for line in block.splitlines()[1:-1]]
    rest = FENCED.sub("", text)
    inline = [" ".join(piece.split()) for piece in INLINE.findall(rest)]
    return [*fenced, *inline, *INDENTED.findall(rest)]
