"""Nothing opens files but the readers that docs/security.md names, and what reads this machine's and this project's
own: a file from others has one way in.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.docs.test_security import checking_files

ROOMS = ("gemel", "merger", "edge_runtime", "models")
OPENING = {
    "open", "read_text", "read_bytes", "fromfile", "load_file", "safe_open", "imread", "VideoCapture", "memmap",
    "torch.load", "json.load", "json.loads", "yaml.load", "yaml.safe_load", "pickle.load", "pickle.loads", "np.load",
}  # fmt: skip
OWN = {
    "edge_runtime/memory/store.py": "the bundle that was checked and is mapped",
    "edge_runtime/capture/sources.py": "a camera's stream",
    "gemel/cli.py": "/dev/null",
    "models/process.py": "/dev/null",
    "edge_runtime/sinks/jsonl.py": "an output, and whether its last line is whole",
    "gemel/doctor.py": "reads back what it wrote, to measure the disk",
    "gemel/report/templates.py": "its own pages and style",
    "edge_runtime/engines/package_cache.py": "/proc, and this project's sources",
    "edge_runtime/engines/onnx.py": "/proc",
    "edge_runtime/simulation/profile_io.py": "/proc",
    "edge_runtime/service.py": "/proc",
    "edge_runtime/http/app.py": "its own pages",
    "edge_runtime/samples.py": "its own folder",
    "merger/distributed.py": "what the processes of a merge tell each other",
    "merger/checkpoint.py": "a merge's state, after its seal",
    "merger/merging.py": "a workload that was read before, for its digest",
    "merger/report.py": "its own report, as JSON would give it back",
    "models/export.py": "metadata that were written before",
    "models/io.py": "a cache that nobody else can write to, and this project's sources",
    "models/sharing/layers.py": "arguments that were JSON before",
}


def _called(node: ast.Call) -> set[str]:
    function = node.func
    if isinstance(function, ast.Name):
        return {function.id}
    if isinstance(function, ast.Attribute):
        owner = function.value.id if isinstance(function.value, ast.Name) else ""
        ours = function.attr == "open" and not node.args  # of a sink, of a workbench
        return set() if ours else {function.attr, f"{owner}.{function.attr}"}
    return set()


def _opening(repository: Path) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for path in sorted(path for room in ROOMS for path in (repository / room).rglob("*.py")):
        calls = [node for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, ast.Call)]
        if names := OPENING & {name for call in calls for name in _called(call)}:
            found[str(path.relative_to(repository))] = names
    return found


def test_nothing_else_opens_files(repository: Path) -> None:
    found = _opening(repository)
    assert {file: names for file, names in found.items() if file not in checking_files() | set(OWN)} == {}
    assert sorted(set(OWN) - set(found)) == [], "these open nothing any more"


@pytest.mark.parametrize(
    "line", ["open(p)", "p.read_text()", "torch.load(p)", "x.y.read_bytes()", "np.fromfile(p)", "p.open('rb')"]
)
def test_an_opening_call_is_seen(tmp_path: Path, line: str) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "new.py").write_text(f"def f(p, x):\n    return {line}\n")
    assert list(_opening(tmp_path)) == ["models/new.py"]
