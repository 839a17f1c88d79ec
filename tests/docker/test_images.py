"""Images of a box: built from the product alone, run without root, and with a health check."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gemel.edge_runtime.http.app import HttpService
from gemel.edge_runtime.http.auth import Access
from gemel.edge_runtime.http.metrics import Metrics
from tests.edge_runtime.http.box import Box
from tests.source_rules import LINKED

ROOT = Path(__file__).resolve().parents[2]
IMAGES = sorted((ROOT / "docker").glob("*.Dockerfile"))
TOKEN = "a-token-of-32-characters-or-more"


@pytest.mark.parametrize("image", IMAGES, ids=lambda path: path.name)
def test_it_runs_as_nobody_in_particular_and_starts_the_box(image: Path) -> None:
    steps = re.findall(r"^([A-Z]+) (.+)$", image.read_text().replace("\\\n", " "), re.MULTILINE)
    last = dict(steps)
    assert last["USER"] == "10001:10001" and last["VOLUME"] == "/data" and "healthy.py" in last["HEALTHCHECK"]
    assert (last["ENTRYPOINT"], last["CMD"]) == ('["gemel"]', '["run", "/box/box.yaml"]')
    assert re.search(r":[\w.-]+( |$)", last["FROM"]), "a base with its version"
    for what, rest in steps:
        if what == "COPY" and "--from" not in rest:
            assert all((ROOT / source).exists() for source in rest.split()[:-1])


@pytest.mark.parametrize("image", IMAGES, ids=lambda path: path.name)
def test_it_has_no_mistake_that_hadolint_finds(image: Path) -> None:
    program = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None:
        pytest.skip("hadolint is not installed")
    checked = subprocess.run([program, image], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_a_root_is_not_built_where_something_is_or_for_an_unknown_processor(tmp_path: Path) -> None:
    for arch, folder, fault in (("sparc", tmp_path / "new", "name x86_64 or aarch64"), ("aarch64", tmp_path, "there")):
        command = ["sh", "docker/root.sh", arch, str(folder)]
        built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert built.returncode == 2 and fault in built.stderr and len(built.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_it_is_built_by_buildah() -> None:
    """Where buildah is installed and has the base image, or can get it."""
    program = shutil.which("buildah")
    if program is None:
        pytest.skip("buildah is not installed")
    base = re.findall(r"^FROM (\S+)", (ROOT / "docker" / "x86.Dockerfile").read_text(), re.MULTILINE)[0]
    if subprocess.run([program, "pull", "--policy", "missing", base], capture_output=True, check=False).returncode:
        pytest.skip(f"buildah cannot get {base}")
    how = ["--isolation", "chroot"]
    command = [program, "build", *how, "--format", "docker", "-f", "docker/x86.Dockerfile", "-t", "gemel-test", "."]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr[-3000:]
    run = [program, "run", *how, "gemel-test-box", "--", "gemel"]
    try:
        subprocess.run([program, "from", "--pull=never", "--name", "gemel-test-box", "gemel-test"], check=True)
        version = subprocess.run([*run, "--version"], capture_output=True, text=True, check=True)
        assert version.stdout.startswith("gemel ")
        checked = subprocess.run([*run, "run", "--check", "/box/box.yaml"], capture_output=True, text=True, check=False)
        assert checked.returncode and "/box/box.yaml" in checked.stderr, "there is no config in the image"
    finally:
        subprocess.run([program, "rm", "gemel-test-box"], capture_output=True, check=False)
        subprocess.run([program, "rmi", "gemel-test"], capture_output=True, check=False)


def test_what_is_built_from_is_the_product_alone() -> None:
    kept = set(re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE))
    assert kept == {"gemel", *LINKED} | {
        "LICENSE",
        "README.md",
        "docker/requirements.txt",
        "docker/healthy.py",
        "pyproject.toml",
    }


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_its_health_is_that_of_the_box(host: str) -> None:
    box = Box()
    service = HttpService(box, Metrics(["bridge-cars"]), Access(host, 0, TOKEN), "box.yaml")
    service.start()

    def request_health() -> int:
        told = {"GEMEL_HTTP": f"http://127.0.0.1:{service.port}"}
        command = [sys.executable, str(ROOT / "docker" / "healthy.py")]
        return subprocess.run(command, env=os.environ | told, capture_output=True, check=False).returncode

    try:
        assert request_health() == 0
        box.moves = False
        assert request_health() == 1
    finally:
        service.stop()
    assert request_health() == 1
