"""Counts what the redesign promised to reduce: lines, files, constants, untyped values, words of docs.

Usage: python -m benchmarks.code_size [--json]
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections import Counter
from pathlib import Path

PRODUCT = ("models", "merger", "edge_runtime", "gemel", "video_samples")
VAGUE_NAMES = frozenset({
    "found", "own", "one", "known", "made", "given", "mine", "others", "named", "said", "what", "each", "most", "left",
    "kept", "wanted", "asked", "here", "rest", "few", "able", "held", "apart", "alike",
})  # fmt: skip
"""Names that say nothing of their value; a reader needs its noun."""


def count_code(root: Path) -> dict[str, int]:
    """Each measure by name, for the checkout at `root`."""
    product = [path for package in PRODUCT for path in (root / package).rglob("*.py")]
    merger = [path for path in product if path.relative_to(root).parts[0] == "merger"]
    docs = list((root / "docs").glob("*.md"))
    counts = {
        "product lines": sum(map(count_lines, product)),
        "product files": len(product),
        "test lines": sum(map(count_lines, (root / "tests").rglob("*.py"))),
        "benchmark lines": sum(map(count_lines, (root / "benchmarks").rglob("*.py"))),
        "numeric module constants in merger": sum(map(count_numeric_constants, merger)),
        "dict[str, Any] in merger": sum(path.read_text().count("dict[str, Any]") for path in merger),
        "words of docs": sum(len(path.read_text().split()) for path in [*docs, root / "README.md"]),
        "bare participles as function names": sum(map(count_participles, product)),
    }
    by_package = Counter[str]()
    for path in product:
        by_package[path.relative_to(root).parts[0]] += count_lines(path)
    return counts | {f"lines of {package}": lines for package, lines in by_package.items()}


def count_nodes(package: Path) -> int:
    """Expressions and statements of a package (nodes of the syntax tree); linked folders count where they lie."""
    trees = (ast.parse(path.read_bytes()) for path in package.rglob("*.py") if path.resolve().is_relative_to(package))
    return sum(isinstance(node, ast.expr | ast.stmt) for tree in trees for node in ast.walk(tree))


def count_vague_names(package: Path) -> int:
    """Bindings of VAGUE_NAMES in a package: variables and fields that are assigned, also by loops."""
    trees = (ast.parse(path.read_bytes()) for path in package.rglob("*.py") if path.resolve().is_relative_to(package))
    names = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name))
    return sum(isinstance(name.ctx, ast.Store) and name.id in VAGUE_NAMES for name in names)


def count_lines(path: Path) -> int:
    """Lines of a file."""
    return len(path.read_bytes().splitlines())


def count_numeric_constants(path: Path) -> int:
    """Numbers (and tuples of numbers) that a module assigns to an upper-case name, outside any class."""
    assigned = 0
    for node in ast.parse(path.read_bytes()).body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        if isinstance(target, ast.Name) and re.fullmatch(r"_?[A-Z][A-Z0-9_]*", target.id):
            parts = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
            assigned += bool(parts) and all(_is_number(part) for part in parts)
    return assigned


def count_participles(path: Path) -> int:
    """Functions that are named by one word in -ed (see tests/language_rules.py for the whole rule)."""
    functions = (node for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, ast.FunctionDef))
    return sum(bool(re.fullmatch(r"_?[a-z]{2,}ed", node.name)) for node in functions)


def _is_number(node: ast.expr) -> bool:
    try:
        value = eval(compile(ast.Expression(node), "", "eval"), {"__builtins__": {}})
    except Exception:
        return False
    return isinstance(value, int | float) and not isinstance(value, bool)


def main() -> None:
    """Print the measures of this checkout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--root", type=Path, default=Path())
    options = parser.parse_args()
    counts = count_code(options.root)
    print(json.dumps(counts) if options.json else "\n".join(f"{name:45} {count:8,}" for name, count in counts.items()))


if __name__ == "__main__":
    main()
