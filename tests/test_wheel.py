"""The wheel, in an environment of its own, runs a box without torch, from a folder without this repository."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tests.edge_runtime.tiny import tiny_bundle, write_clip, write_folder
from tests.without_torch import BLOCK

PRODUCT = ("models", "merger", "edge_runtime", "gemel", "video_samples")
LIBRARIES = Path(os.__file__).parent


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

    assert run("--version").startswith("gemel ")
    assert '"id": "gate"' in run("bundle", "show", "box.safetensors", "--json")
    summary = run("run", "box.safetensors", "--camera", "left=left.mp4", "--camera", "right=right", "--json")
    assert '"balanced": true' in summary.splitlines()[-1]
