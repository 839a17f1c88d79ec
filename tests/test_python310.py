"""Every file compiles on the oldest supported Python (JetPack 6 has nothing newer) and uses only its library."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

OLDEST = "3.10"
NEWER = {
    "tomllib": "*", "datetime": {"UTC"}, "enum": {"StrEnum", "ReprEnum", "verify"}, "contextlib": {"chdir"},
    "hashlib": {"file_digest"}, "asyncio": {"timeout", "TaskGroup", "Runner"}, "sys": {"exception"},
    "typing": {"Self", "Never", "LiteralString", "assert_never", "assert_type", "NotRequired", "Required", "Unpack",
               "TypeVarTuple", "override", "dataclass_transform"}, "itertools": {"batched"},
}  # fmt: skip
"""Names of the standard library that came after it."""
LATER = re.compile(
    "|".join(rf"\b{name}\b" for module, names in NEWER.items() for name in ({module} if names == "*" else names))
)
COMPILE_ALL = """
import ast, sys
for name in {files!r}:
    compile(open(name, encoding="utf-8").read(), name, "exec", ast.PyCF_ONLY_AST)
print(*sys.version_info[:2], sep=".")
"""


@pytest.fixture(scope="module")
def oldest_python() -> str:
    """That interpreter, from the path or pyenv; skips where there is none."""
    home = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    installed = sorted(str(path) for path in home.glob(f"versions/{OLDEST}.*/bin/python"))
    for path in (shutil.which(f"python{OLDEST}"), *installed):
        if path and subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0:
            return path
    pytest.skip(f"there is no Python {OLDEST} here")


def source_files(repository: Path) -> list[Path]:
    folders = ("gemel", "merger", "edge_runtime", "models", "video_samples", "benchmarks", "tests")
    return [path for folder in folders for path in sorted((repository / folder).rglob("*.py"))]


def test_files_compile_on_oldest_python(oldest_python: str, repository: Path) -> None:
    script = COMPILE_ALL.format(files=[str(path) for path in source_files(repository)])
    ended = subprocess.run([oldest_python, "-c", script], capture_output=True, text=True, check=False)
    assert ended.stdout.strip() == OLDEST, ended.stderr[-2000:]


def test_files_use_only_the_oldest_standard_library(repository: Path, project) -> None:
    assert project["project"]["requires-python"] == f">={OLDEST}"
    assert project["tool"]["ruff"]["target-version"] == "py" + OLDEST.replace(".", "")
    found = [(path.relative_to(repository), *use) for path in source_files(repository) for use in newer_uses(path)]
    assert not found


def newer_uses(path: Path) -> list[tuple[int, str]]:
    """Line and name of what a file uses of NEWER."""
    found, text = [], path.read_text()
    if not LATER.search(text):
        return []  # nothing to parse for
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module in NEWER:
            names = NEWER[node.module]
            found += [(node.lineno, one.name) for one in node.names if names == "*" or one.name in names]
        elif isinstance(node, ast.Import):
            found += [(node.lineno, one.name) for one in node.names if NEWER.get(one.name) == "*"]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found += [(node.lineno, node.attr)] * (node.attr in NEWER.get(node.value.id, ()))
    return found


def test_newer_uses_later_names_are_found(tmp_path: Path) -> None:
    path = tmp_path / "new.py"
    path.write_text("import tomllib, sys\nfrom typing import Self\nsys.exception()\n")
    assert sorted(line for line, _ in newer_uses(path)) == [1, 2, 3]
