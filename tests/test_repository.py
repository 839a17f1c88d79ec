"""The README, the Makefile, the CI script and pyproject.toml agree with each other and with the files."""

from __future__ import annotations

import re
import shutil
import stat
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

BASH = shutil.which("bash") or "/bin/bash"


def make_targets(repository: Path) -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (repository / "Makefile").read_text(), re.MULTILINE))


def test_readme_make_commands_exist(repository: Path):
    asked = set(re.findall(r"\bmake ([a-z-]+)", (repository / "README.md").read_text()))
    assert {"demo", "test"} <= asked
    assert asked <= make_targets(repository)


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
    patterns = project["tool"]["setuptools"]["packages"]["find"]["include"]
    for package in ("gemel", "merger", "edge_runtime", "models", "video_samples"):
        assert f"{package}*" in patterns and (repository / package / "__init__.py").is_file()
    assert project["project"]["scripts"]["gemel"] == "gemel.cli:main"


def dependencies_of(project: dict[str, Any]) -> list[str]:
    """All that is installed for the project, in any of its forms."""
    return [*project["project"]["dependencies"], *chain(*project["project"]["optional-dependencies"].values())]


def test_extras_hold_one_onnxruntime_package_each(project: dict[str, Any]):
    extras = project["project"]["optional-dependencies"]
    of_runtime = {name: re.findall(r"onnxruntime[a-z-]*", " ".join(wanted)) for name, wanted in extras.items()}
    assert (of_runtime.pop("cpu"), of_runtime.pop("gpu")) == (["onnxruntime"], ["onnxruntime-gpu"])
    assert not any(of_runtime.values()) and "gpu" not in " ".join(extras["dev"])
    assert not any("onnxruntime" in name for name in project["project"]["dependencies"])


def test_dependencies_state_their_purpose(repository: Path, project: dict[str, Any]):
    text = (repository / "pyproject.toml").read_text()
    for name in dependencies_of(project):
        line = next(line for line in text.splitlines() if f'"{name}"' in line)
        assert name.startswith("gemel[") or re.search(r"# \w+", line), name


def test_dependencies_are_pinned_by_constraints(repository: Path, project: dict[str, Any]):
    wanted = {re.split(r"[\[><=]", name)[0].lower() for name in dependencies_of(project)} - {"gemel"}
    held = {
        line.split("==")[0].lower()
        for line in (repository / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    assert wanted <= held


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
