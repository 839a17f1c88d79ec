"""Reads the source files: which file imports which, and which break a rule of docs/architecture.md.

Nothing is imported: imports are read from the syntax, those for type checkers and those inside functions too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

MAX_LINES = 800
MAX_PARAMETERS = 9
"""Of one public function, self and cls not counted."""
LINKED = ("models", "merger", "edge_runtime", "video_samples")
"""Folders at the top of the repository that are linked into gemel/, where they are imported from."""
MEANINGLESS_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}


@dataclass(frozen=True)
class Source:
    """One python file: its dotted name (an `__init__.py` has its package's) and its path."""

    name: str
    path: Path

    @property
    def package(self) -> str:
        """The folder at the top of the repository that it belongs to."""
        return package_of(self.name)

    @property
    def is_init(self) -> bool:
        """Whether it is an `__init__.py`."""
        return self.path.name == "__init__.py"

    @cached_property
    def tree(self) -> ast.Module:
        """Its syntax."""
        return ast.parse(self.path.read_bytes(), str(self.path))


def package_of(name: str) -> str:
    """The folder at the top of the repository that holds a module: `models` of gemel.models.files.io."""
    first, _, rest = name.partition(".")
    inner = rest.partition(".")[0]
    return inner if first == "gemel" and inner in LINKED else first


def sources(root: Path, packages: Iterable[str]) -> dict[str, Source]:
    """Every python file of these packages, by the dotted name that it is imported by."""
    found = {}
    for path in sorted(file for package in packages for file in (root / package).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        parts = ("gemel", *parts) if parts[0] in LINKED else parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = Source(name, path)
    return found


def imports(source: Source, names: Iterable[str]) -> set[str]:
    """Which of these modules a file imports, wherever in the file it does."""
    return set(names).intersection(_named_imports(source)) - {source.name}


def circles(edges: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """The sets of files that reach each other by imports, each sorted: the strongly connected components (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    open_now: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        open_now.append(name)
        for other in edges.get(name, ()):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in open_now:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            start = open_now.index(name)
            together = sorted(open_now[start:])
            del open_now[start:]
            if len(together) > 1:
                found.append(together)

    for name in edges:
        if name not in index:
            visit(name)
    return sorted(found)


def forbidden_imports(edges: Mapping[str, Iterable[str]], layers: Mapping[str, set[str]]) -> list[str]:
    """Imports of a package that the importing package's layer forbids; `layers` says which packages each may import."""
    return sorted(
        f"{name} imports {other}"
        for name, others in edges.items()
        for other in others
        if (mine := package_of(name)) != (theirs := package_of(other)) and theirs not in layers[mine]
    )


def long_files(files: Iterable[Source]) -> list[str]:
    """Files of more than MAX_LINES lines."""
    counted = ((source.name, len(source.path.read_bytes().splitlines())) for source in files)
    return sorted(f"{name} has {lines} lines" for name, lines in counted if lines > MAX_LINES)


def overloaded_functions(source: Source) -> list[str]:
    """Public functions, methods and constructors of one file that take more than MAX_PARAMETERS."""
    return [
        f"{source.name}.{name} takes {count}"
        for name, count in _public_functions(source.tree.body)
        if count > MAX_PARAMETERS
    ]


def files_without_docstring(files: Iterable[Source]) -> list[str]:
    """Files that do not begin with a docstring."""
    return sorted(source.name for source in files if not ast.get_docstring(source.tree))


def folders_without_init(files: Iterable[Source]) -> list[str]:
    """Folders with python files but without `__init__.py`."""
    files = list(files)
    inits = {source.path.parent for source in files if source.is_init}
    return sorted({str(source.path.parent) for source in files if source.path.parent not in inits})


def meaningless_names(files: Iterable[Source]) -> list[str]:
    """Modules and folders with a name that fits any content."""
    return sorted(source.name for source in files if MEANINGLESS_NAMES & set(source.name.split(".")))


def _named_imports(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _base(source, node)
            # `from a import b` reads the file a.b where there is one; then `a/__init__.py` itself is not imported from
            inner = [f"{base}.{alias.name}" for alias in node.names]
            yield from inner
            if not all(_is_module(source, name) for name in inner):
                yield base
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str))


def _base(source: Source, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = source.name.split(".")
    kept = parts[: len(parts) - node.level + source.is_init]
    return ".".join([*kept, *filter(None, [node.module])])


def _is_module(source: Source, name: str) -> bool:
    depth = len(source.name.split(".")) - (not source.is_init)
    linked = source.name.startswith("gemel.") and source.package in LINKED
    root = source.path.parents[depth - linked]
    name = name.removeprefix("gemel.") if name.startswith("gemel.") and package_of(name) in LINKED else name
    path = root.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def _public_functions(body: list[ast.stmt], within: str = "") -> Iterator[tuple[str, int]]:
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from _public_functions(node.body, f"{within}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _is_public(node.name):
            yield f"{within}{node.name}", _parameters(node, method=bool(within))


def _is_public(name: str) -> bool:
    return not name.startswith("_") or name in ("__init__", "__call__")


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef, method: bool) -> int:
    named = [*node.args.posonlyargs, *node.args.args]
    decorators = {decorator.id for decorator in node.decorator_list if isinstance(decorator, ast.Name)}
    bound = method and bool(named) and "staticmethod" not in decorators
    return len(named) - bound + len(node.args.kwonlyargs)
