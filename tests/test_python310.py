"""The oldest Python that is promised (JetPack 6 has nothing newer): every file compiles there, and what needs no
library is imported and used. Skipped where that interpreter is not to be had.
"""

from __future__ import annotations

import ast
import os
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
"""What the standard library has only since then, as far as anybody is likely to use it."""
WITHOUT_ORDER = {("from_bytes", 1), ("to_bytes", 0), ("to_bytes", 1)}
"""Calls by name and number of arguments."""
PURE = """
import ast, sys
for name in {files!r}:
    compile(open(name, encoding="utf-8").read(), name, "exec", ast.PyCF_ONLY_AST)
import models.errors, models.errors, models.io, models.bits
import edge_runtime.backoff, edge_runtime.variables, edge_runtime.memory.placing, edge_runtime.memory.copies
import edge_runtime.capture.reconnection, edge_runtime.delivery.outbox, edge_runtime.frames.ledger
import edge_runtime.schedule.costs, edge_runtime.schedule.overflow, edge_runtime.reloading.steps
from edge_runtime.capture.reconnection import Phase
assert str(Phase.AWAY) == f"{{Phase.AWAY}}" == "away"
try:
    raise KeyboardInterrupt
except KeyboardInterrupt:
    try:
        models.errors.InputError("file", "fault")
    except KeyboardInterrupt:
        print(*sys.version_info[:2], sep=".")
"""


@pytest.fixture(scope="module")
def oldest() -> str:
    """That interpreter: on the path, or among pyenv's."""
    home = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    kept = sorted(str(path) for path in home.glob(f"versions/{OLDEST}.*/bin/python"))
    for path in (shutil.which(f"python{OLDEST}"), *kept):
        if path and subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0:
            return path
    pytest.skip(f"there is no Python {OLDEST} here")


def files(repository: Path) -> list[Path]:
    folders = ("gemel", "merger", "edge_runtime", "models", "video_samples", "benchmarks", "tests")
    return [path for folder in folders for path in sorted((repository / folder).rglob("*.py"))]


def test_every_file_compiles_with_the_oldest_python_and_the_plain_ones_work(oldest: str, repository: Path) -> None:
    script = PURE.format(files=[str(path) for path in files(repository)])
    env = {**os.environ, "PYTHONPATH": str(repository), "PYTHONDONTWRITEBYTECODE": "1"}
    ended = subprocess.run([oldest, "-c", script], env=env, capture_output=True, text=True, check=False)
    assert ended.stdout.strip() == OLDEST, ended.stderr[-2000:]


def test_nothing_is_asked_of_the_standard_library_that_it_got_later(repository: Path, project) -> None:
    assert project["project"]["requires-python"] == f">={OLDEST}"
    assert project["tool"]["ruff"]["target-version"] == "py" + OLDEST.replace(".", "")
    found = [
        f"{path.relative_to(repository)}:{line}: {what}" for path in files(repository) for line, what in newer(path)
    ]
    assert not found, "\n".join(found)


def newer(path: Path) -> list[tuple[int, str]]:
    """What a file uses of NEWER, and numbers made of bytes without their order."""
    found = []
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.ImportFrom) and node.module in NEWER:
            names = NEWER[node.module]
            found += [(node.lineno, one.name) for one in node.names if names == "*" or one.name in names]
        elif isinstance(node, ast.Import):
            found += [(node.lineno, one.name) for one in node.names if NEWER.get(one.name) == "*"]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found += [(node.lineno, node.attr)] * (node.attr in NEWER.get(node.value.id, ()))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not node.keywords:
            found += [(node.lineno, node.func.attr)] * ((node.func.attr, len(node.args)) in WITHOUT_ORDER)
    return found


def test_what_came_later_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "new.py"
    path.write_text("import tomllib, sys\nfrom typing import Self\nint.from_bytes(b'a')\nsys.exception()\n")
    assert sorted(line for line, _ in newer(path)) == [1, 2, 3, 4]
