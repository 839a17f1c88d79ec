"""The README, the Makefile, the CI script and pyproject.toml agree with each other and with the files."""

from __future__ import annotations

import json
import re
import shutil
import stat
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from tests.source_rules import LINKED

BASH = shutil.which("bash") or "/bin/bash"


def make_targets(repository: Path) -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (repository / "Makefile").read_text(), re.MULTILINE))


def test_readme_make_commands_exist(repository: Path):
    asked = set(re.findall(r"\bmake ([a-z-]+)", (repository / "README.md").read_text()))
    assert {"demo", "test"} <= asked
    assert asked <= make_targets(repository)


def test_demo_takes_the_same_time_wherever_it_is_told(repository: Path, capsys: pytest.CaptureFixture[str]):
    from gemel.cli import parse_command

    assert parse_command(["demo", "--help"]) == 0
    texts = [*((repository / name).read_text() for name in ("README.md", "Makefile")), capsys.readouterr().out]
    told = [re.findall(r"about (\w+) minutes", " ".join(text.split())) for text in texts]
    assert told == [["five"]] * 3


def test_makefile_required_targets_exist(repository: Path):
    assert {"demo", "test", "test-all", "lint", "real"} <= make_targets(repository)


def test_readme_gemel_commands_parse(repository: Path):
    from gemel.cli import parse_command

    text = (repository / "README.md").read_text()
    commands = re.findall(r"(?:^    |`)gemel ([^#`\n]+)", text, re.MULTILINE)
    assert {command.split()[0] for command in commands} >= {"merge", "run", "eval", "inspect", "train"}
    for command in commands:
        parse_command(command.split())


def test_readme_local_links_exist(repository: Path):
    links = re.findall(r"\]\(([^)#:]+)\)", (repository / "README.md").read_text())
    missing = [link for link in links if not (repository / link).exists()]
    assert links and not missing


def test_ci_runs_lint_and_tests(repository: Path):
    script = repository / ".ci" / "run"
    assert script.stat().st_mode & stat.S_IXUSR
    called = re.findall(r"^ *(?:make|tests) ([a-z-]+)\b", script.read_text(), re.MULTILINE)
    assert called == ["lint", "test", "test-all"]


def test_make_test_and_test_all_differ_by_marker_and_workers(repository: Path):
    recipes = dict(re.findall(r"^(test(?:-all)?):.*\n\t(.+)$", (repository / "Makefile").read_text(), re.MULTILINE))
    short = recipes["test"].replace(" -m 'not exhaustive'", "")
    assert short.replace(" --numprocesses 3", "") == recipes["test-all"] != short != recipes["test"]


def executable(path: Path, script: str) -> None:
    path.write_text(f"#!{BASH}\n{script}")
    path.chmod(0o755)


def test_system_packages_missing_one_installs_the_others(repository: Path, tmp_path: Path):
    executable(tmp_path / "id", "echo 0")
    executable(tmp_path / "make", "")
    executable(tmp_path / "apt-get", 'echo "$@" >&2; [ "${!#}" != chromium ]')
    environment = {"PATH": str(tmp_path), "PYTHON": sys.executable}
    script = repository / ".ci" / "system-packages"
    ended = subprocess.run([BASH, script], capture_output=True, text=True, env=environment, check=False)
    assert ended.returncode == 0 and ended.stderr.count("its tests are skipped: chromium\n") == 1
    asked = {line.split()[-1] for line in ended.stderr.splitlines() if line.startswith("install ")}
    assert asked >= {"chromium", "openssh-client", "systemd", "g++"}


PASSED, FAILED = "echo '===== 3 passed in 0.1s ====='", "echo '===== 1 failed, 2 passed in 0.1s ====='; exit 1"


@pytest.mark.parametrize(
    ("linted", "made", "exhaustive", "code", "said"),
    [
        ("true", PASSED, "echo '===== 9 passed in 0.1s ====='", 0, "9 passed"),
        ("true", PASSED, FAILED, 2, "1 failed"),
        ("true", FAILED, "echo 'is not run'", 2, "1 failed"),
        ("true", PASSED, "echo 'nothing ran'", 1, "before pytest could sum up"),
        ("true", "echo 'could not install'; exit 1", PASSED, 2, "before pytest could sum up"),
        ("true", "echo 'nothing ran'", PASSED, 1, "before pytest could sum up"),
        ("false", PASSED, PASSED, 2, "3 passed"),
    ],
)
def test_ci_exit_code_follows_lint_and_pytest(
    repository: Path, tmp_path: Path, linted: str, made: str, exhaustive: str, code: int, said: str
):
    (tmp_path / ".ci").mkdir()
    script = tmp_path / ".ci" / "run"
    script.write_text((repository / ".ci" / "run").read_text())
    executable(tmp_path / ".ci" / "system-packages", "")
    (tmp_path / "Makefile").write_text(f"lint:\n\t@{linted}\ntest:\n\t@{made}\ntest-all:\n\t@{exhaustive}\n")
    ended = subprocess.run(["bash", str(script)], capture_output=True, text=True, check=False)
    assert ended.returncode == code
    assert said in ended.stdout.strip().splitlines()[-1] or said in ended.stderr.strip().splitlines()[-1]


def test_within_late_test_is_skipped_with_reason(repository: Path, tmp_path: Path):
    (tmp_path / "test_two.py").write_text(
        "import tests.conftest as own\n\ndef test_long():\n    own.STARTED -= 1000\n\ndef test_late():\n    assert 0\n"
    )
    words = [sys.executable, "-m", "pytest", "-rs", "-p", "tests.conftest", "-p", "no:cacheprovider", tmp_path]
    ended = subprocess.run([*words, "--within", "900"], cwd=repository, capture_output=True, text=True, check=False)
    assert ended.returncode == 0 and "1 passed, 1 skipped" in ended.stdout
    assert "900 seconds are over: `make test-all` runs it" in ended.stdout


def test_setuptools_builds_every_package(repository: Path, project: dict[str, Any]):
    assert project["tool"]["setuptools"]["packages"]["find"]["include"] == ["gemel*"]
    for package in LINKED:
        link = repository / "gemel" / package
        assert link.is_symlink() and link.readlink() == Path("..", package) and (link / "__init__.py").is_file()
    assert project["project"]["scripts"]["gemel"] == "gemel.cli:main"


def test_packages_are_imported_below_one_name(repository: Path):
    folders = ("gemel", *LINKED, "benchmarks", "tests")
    own = re.compile(rf"^\s*(?:from|import)\s+(?:{'|'.join(LINKED)})\b", re.MULTILINE)
    paths = [path for folder in folders for path in (repository / folder).rglob("*.py")]
    found = {str(path.relative_to(repository)) for path in paths if own.search(path.read_text())}
    assert found == set()


def dependencies_of(project: dict[str, Any]) -> list[str]:
    """All that is installed for the project, in any of its forms."""
    return [*project["project"]["dependencies"], *chain(*project["project"]["optional-dependencies"].values())]


def test_a_box_is_installed_without_what_merges_alone_need(project: dict[str, Any]):
    needed = [re.split(r"[><=;]", name)[0] for name in project["project"]["dependencies"]]
    extras = project["project"]["optional-dependencies"]
    of_merges = [re.split(r"[><=;]", name)[0] for name in extras["merge"]]
    assert {"torch", "torchvision", "scipy", "onnxscript"} <= set(of_merges)
    assert "onnxruntime" in needed and not set(needed) & set(of_merges)
    assert not any("onnxruntime" in name for name in chain(*extras.values())), "its packages overwrite each other"


def test_dependencies_state_their_purpose(repository: Path, project: dict[str, Any]):
    text = (repository / "pyproject.toml").read_text()
    for name in dependencies_of(project):
        line = next(line for line in text.splitlines() if f'"{name}"' in line)
        assert name.startswith("gemel[") or re.search(r"# \w+", line), name


@pytest.mark.parametrize(
    ("file", "extras"), [("constraints.txt", ("merge", "test", "ray", "dev")), ("docker/requirements.txt", ("zmq",))]
)
def test_locked_requirement_has_a_version_and_hashes(
    repository: Path, project: dict[str, Any], file: str, extras: tuple[str, ...]
):
    optional = project["project"]["optional-dependencies"]
    wanted = [*project["project"]["dependencies"], *chain(*(optional[extra] for extra in extras))]
    names = {re.split(r"[\[><=;]", name)[0].lower().replace("_", "-") for name in wanted} - {"gemel"}
    text = re.sub(r"^#.*\n", "", (repository / file).read_text(), flags=re.MULTILINE)
    entries = [entry for entry in text.replace("\\\n", " ").splitlines() if entry.strip()]
    assert names <= {entry.partition("==")[0].lower().replace("_", "-") for entry in entries}
    assert all("==" in entry and "--hash=sha256:" in entry for entry in entries)


def test_sbom_lists_what_is_installed(tmp_path: Path):
    out = tmp_path / "sbom.json"
    command = [sys.executable, "-m", "cyclonedx_py", "environment", "--output-file", out, sys.executable]
    subprocess.run(command, check=True, capture_output=True)
    listed = {component["name"].lower() for component in json.loads(out.read_text())["components"]}
    assert {"gemel", "numpy", "onnx", "safetensors"} <= listed


def test_every_file_that_code_and_docs_name_is_there(repository: Path):
    folders = ("benchmarks", "docs", "edge_runtime", "gemel", "merger", "models", "video_samples")
    named = re.compile(rf"\b(?:{'|'.join(folders)}|tests)/[\w./-]+\.(?:py|md|yaml)\b")
    texts = [
        path for folder in folders for ending in ("py", "md") for path in (repository / folder).rglob(f"*.{ending}")
    ]
    missing = {
        (path.name, name)
        for path in [*texts, *repository.glob("*.md")]
        for name in named.findall(path.read_text(encoding="utf-8"))
        if not (repository / name).exists()
    }
    assert not missing


def test_each_change_is_one_item_with_a_topic(repository: Path):
    changes = sorted((repository / "changes").glob("*"))
    for path in changes:
        text = path.read_text()
        assert path.suffix == ".md" and re.fullmatch(r"- \*\*[^*]+\*\*: .+\n(  .+\n)*", text), path
        assert max(map(len, text.splitlines())) <= 120, path
    assert "[changes](changes)" in (repository / "CHANGELOG.md").read_text()


def test_changelog_begins_with_the_version_of_the_project(repository: Path):
    version = re.search(r'^version = "(.+)"$', (repository / "pyproject.toml").read_text(), re.MULTILINE)
    heading = re.search(r"^## (.+)$", (repository / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert version and heading and version[1] == heading[1]
