"""The wheel, in an environment of its own, runs a box without torch, from a folder without this repository."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from gemel.models.bundle import open_bundle
from tests.edge_runtime.tiny import tiny_bundle, write_clip, write_folder
from tests.without_torch import BLOCK

PRODUCT = ("models", "merger", "edge_runtime", "gemel", "video_samples")
STRANGER = '''
from pathlib import Path
import numpy as np
from gemel.edge_runtime.engines.base import FrameEngine
from gemel.edge_runtime.sinks.base import Sink, SinkConfig

class Echo(FrameEngine):
    """Always the same class."""

    name, in_pages, options = "echo", True, {"label": int}

    def __init__(self, bundle, query_id, device="cpu", label=0):
        super().__init__(bundle, query_id, device)
        self._label = label

    weights = {}

    def bind(self, tensor_of, wait=None):
        pass

    def unbind(self):
        pass

    def forward(self, batch):
        return np.eye(len(self.query.classes), dtype=np.float32)[[self._label] * len(batch)]

    def decode(self, outputs, sizes, least_score):
        return self._task.predictions(None, outputs, sizes, self.query.classes, least_score)

    def workspace_of(self, count):
        return 1

class HeapConfig(SinkConfig):
    """Labels on a heap."""

    kind: str = "heap"
    path: str

    def build(self):
        return Heap(self.path)

class Heap(Sink):
    def __init__(self, path):
        self._path = Path(path)

    def write(self, messages):
        with self._path.open("a") as file:
            file.writelines(f"{one.record['label']}\\n" for one in messages)
'''


@pytest.fixture(scope="module")
def wheel(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that no build folder is left here."""
    source = tmp_path_factory.mktemp("source")
    for name in PRODUCT:
        shutil.copytree(repository / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(repository / name, source)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*build, "--wheel-dir", source / "dist", source], check=True, timeout=300)
    (built,) = (source / "dist").glob("*.whl")
    return built


@pytest.mark.exhaustive
def test_wheel_holds_the_packages_and_what_they_read(wheel: Path, repository: Path) -> None:
    (version,) = re.findall(r'^version = "(.+)"$', (repository / "pyproject.toml").read_text(), re.MULTILINE)
    assert f"## {version}\n" in (repository / "CHANGELOG.md").read_text()
    assert wheel.name == f"gemel-{version}-py3-none-any.whl"
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names} == {"gemel", f"gemel-{version}.dist-info"}
    for name in (
        "py.typed",
        "report/pages/page.html",
        "models/decoders/known_classes.json",
        "edge_runtime/life/box.py",
        "models/entry_points.ini",
    ):
        assert f"gemel/{name}" in names
    entries = zipfile.ZipFile(wheel).read(f"gemel-{version}.dist-info/entry_points.txt").decode()
    assert "gemel = gemel.cli:main" in entries
    assert "[gemel.sinks]\njsonl = gemel.edge_runtime.sinks.jsonl:JsonLinesConfig" in entries


@pytest.mark.exhaustive
def test_wheel_in_an_empty_environment_runs_a_box_without_torch(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "empty", with_pip=False)
    (site,) = (tmp_path / "empty" / "lib").glob("python*/site-packages")
    zipfile.ZipFile(wheel).extractall(site)
    # The box's other libraries come from the environment of the tests, without torch.
    (site / "libraries.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    (site / "sitecustomize.py").write_text(BLOCK)
    folder = tmp_path / "box"
    folder.mkdir()
    tiny_bundle(folder / "box.safetensors", documents=True)
    write_clip(folder / "left.mp4", 8)
    write_folder(folder / "right", 8)
    python = tmp_path / "empty" / "bin" / "python"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

    def run(*words: str) -> str:
        done = subprocess.run(
            [python, "-m", "gemel", *words], cwd=folder, env=environment, capture_output=True, text=True, check=False,
            timeout=180,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    install_stranger(site)
    assert run("--version").startswith("gemel ")
    assert '"id": "gate"' in run("bundle", "show", "box.safetensors", "--json")
    summary = run("run", "box.safetensors", "--camera", "left=left.mp4", "--camera", "right=right", "--json")
    assert '"balanced": true' in summary.splitlines()[-1]

    named = json.loads(run("doctor", "--json"))["others"]
    assert [tuple(one.values()) for one in named] == [
        ("engine", "echo", "gemel-stranger 1.0"), ("sink", "heap", "gemel-stranger 1.0")
    ]  # fmt: skip
    config = folder / "stranger.yaml"
    cameras = {"left": {"source": "left.mp4"}, "right": {"source": "right", "fps": 2}}
    sinks = [{"kind": "heap", "path": "heap.txt"}]
    keys = {
        "bundle": "box.safetensors",
        "memory": "512MiB",
        "engine": "echo:label=1",
        "cameras": cameras,
        "sinks": sinks,
    }
    config.write_text(json.dumps(keys))
    checked = json.loads(run("run", str(config), "--check", "--json"))
    assert checked["engine"] == "echo" and [sink["kind"] for sink in checked["sinks"]] == ["heap"]
    summary = json.loads(run("run", str(config), "--json").splitlines()[-1])
    assert summary["balanced"] and set(summary["engines"].values()) == {"echo"}
    labels = (folder / "heap.txt").read_text().split()
    assert labels and set(labels) == {open_bundle(folder / "box.safetensors").query("gate").classes[1]}


def install_stranger(site: Path) -> None:
    """A package of someone else, as its wheel unpacks: an engine and a sink by entry points."""
    wheel = site.parent / "gemel_stranger-1.0-py3-none-any.whl"
    entries = "[gemel.engines]\necho = gemel_stranger:Echo\n[gemel.sinks]\nheap = gemel_stranger:HeapConfig\n"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("gemel_stranger.py", STRANGER)
        file.writestr(
            "gemel_stranger-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: gemel-stranger\nVersion: 1.0\n"
        )
        file.writestr("gemel_stranger-1.0.dist-info/entry_points.txt", entries)
    zipfile.ZipFile(wheel).extractall(site)
