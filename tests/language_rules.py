"""The rules of language (CONTRIBUTING.md), checked in names, docstrings, comments and docs.

Usage: python -m tests.language_rules [PATH ...] prints every violation below these paths.
"""

from __future__ import annotations

import ast
import csv
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

PRODUCT = ("models", "merger", "edge_runtime", "gemel", "video_samples")

NOT_PARTICIPLES = frozenset(
    ("feed", "need", "seed", "speed", "embed", "proceed", "exceed", "succeed", "closed", "sorted")
)
"""Verbs and nouns in -ed, and names that Python itself uses."""


def read_words(kind: str) -> dict[str, str]:
    """The words of one kind in language.csv (name, constant, participle, prose) with what to write instead."""
    with (Path(__file__).parent / "language.csv").open(newline="") as file:
        return {row["word"]: row["instead"] for row in csv.DictReader(file) if row["kind"] == kind}


NAMES, CONSTANTS, PARTICIPLES, PROSE = map(read_words, ("name", "constant", "participle", "prose"))


def find_name_violations(path: Path) -> Iterator[str]:
    """Forbidden names, constants and function names in one Python file."""
    for node in _named_nodes(path):
        if isinstance(node, ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = [node.name, *(argument.arg for argument in [*node.args.args, *node.args.kwonlyargs])]
            if is_bare_participle(node.name) and not _is_value(node):
                yield f"{path}:{node.lineno}: function {node.name} is named by a participle; use a verb with its object"
        else:
            names = [node.id]
        for name in names:
            if instead := NAMES.get(name.lstrip("_")) or _constant_instead(name):
                yield f"{path}:{node.lineno}: {name}: write {instead}"


def is_bare_participle(name: str) -> bool:
    """Whether a function name is one participle without an object: `_tried`, `told`, `kept`."""
    word = name.strip("_")
    if "_" in word or word in NOT_PARTICIPLES:
        return False
    return word in PARTICIPLES or (word.endswith("ed") and len(word) > 3)


def find_prose_violations(path: Path) -> Iterator[str]:
    """Forbidden phrases in the docstrings and comments of a Python file, or in all of a Markdown file."""
    whole = path.read_text()
    if not any(re.search(pattern, whole, re.IGNORECASE) for pattern in PROSE):
        return  # nothing to parse for, as in nearly every file
    for line, text in _prose(path):
        for pattern, remedy in PROSE.items():
            if found := re.search(pattern, text, re.IGNORECASE):
                yield f"{path}:{line + text[: found.start()].count(chr(10))}: '{found.group()}': {remedy}"


def find_duplicate_classes(paths: Iterable[Path]) -> list[str]:
    """Public class names that two product files define."""
    defined: dict[str, list[str]] = defaultdict(list)
    for path in paths:
        for node in _named_nodes(path):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                defined[node.name].append(str(path))
    return sorted(f"{name}: {', '.join(places)}" for name, places in defined.items() if len(places) > 1)


def product_files(root: Path) -> list[Path]:
    """All Python files of the product packages."""
    return [path for package in PRODUCT for path in sorted((root / package).rglob("*.py"))]


@cache
def _named_nodes(path: Path) -> list[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Name]:
    """The classes and functions of a file, and the names that it sets."""
    return [
        node
        for node in ast.walk(ast.parse(path.read_bytes(), str(path)))
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    ]


def _constant_instead(name: str) -> str | None:
    return next((instead for pattern, instead in CONSTANTS.items() if re.search(pattern, name)), None)


def _is_value(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function is read as a value: a property, or a predicate of a class."""
    decorators = {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}
    predicate = isinstance(node.returns, ast.Name) and node.returns.id == "bool"
    return bool(decorators & {"property", "cached_property", "setter"}) or predicate


def _prose(path: Path) -> Iterator[tuple[int, str]]:
    text = path.read_text()
    if path.suffix != ".py":
        yield 1, text
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def main(given: list[str]) -> int:
    """Print all violations below these paths (the product and docs by default); 1 when there are any."""
    roots = [Path(one) for one in given or [*PRODUCT, "docs", "README.md", "CONTRIBUTING.md"]]
    files = [path for root in roots for path in ([root] if root.is_file() else sorted(root.rglob("*")))]
    found = [line for path in files if path.suffix == ".py" for line in find_name_violations(path)]
    found += [line for path in files if path.suffix in (".py", ".md") for line in find_prose_violations(path)]
    found += find_duplicate_classes(path for path in files if path.suffix == ".py" and path.parts[0] in PRODUCT)
    print("\n".join(found) or "no violations")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
