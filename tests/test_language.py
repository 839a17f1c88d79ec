"""Names, docstrings, comments and docs follow the rules of language; each rule fails where it is broken."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.language_rules import (
    find_duplicate_classes,
    find_name_violations,
    find_prose_violations,
    is_bare_participle,
    product_files,
)

PROJECT_TERMS = (
    "arm", "bits", "budget", "bundle", "content name", "deadline", "donor", "evidence", "event", "FLOPs", "group",
    "ledger",
    "layer-sharing bound", "original", "policy state", "query", "receiver", "resident", "sharing plan", "signature",
    "sink", "spool", "suffix sharing", "teacher", "urgency", "workload", "workspace",
)  # fmt: skip
"""Terms with a meaning of this project; one that docs use must be in the glossary."""


def all_files(repository: Path) -> list[Path]:
    return [
        *product_files(repository),
        *(repository / "tests").rglob("*.py"),
        *(repository / "benchmarks").rglob("*.py"),
    ]


def test_names_follow_the_rules(repository: Path):
    assert [line for path in all_files(repository) for line in find_name_violations(path)] == []


def test_prose_follows_the_rules(repository: Path):
    assert [line for path in all_files(repository) for line in find_prose_violations(path)] == []


def test_docs_prose_follows_the_rules(repository: Path):
    pages = [*sorted((repository / "docs").glob("*.md")), repository / "README.md", repository / "CONTRIBUTING.md"]
    assert [line for page in pages for line in find_prose_violations(page)] == []


def test_class_names_are_unique(repository: Path):
    assert find_duplicate_classes(product_files(repository)) == []


@pytest.mark.parametrize("package", ["models", "video_samples"])
def test_file_names_are_unique_within_a_package(repository: Path, package: str):
    names = [path.name for path in (repository / package).rglob("*.py") if not path.name.startswith("__")]
    assert sorted(names) == sorted(set(names))


def test_glossary_has_every_project_term_of_docs(repository: Path):
    glossary = (repository / "docs" / "glossary.md").read_text()
    entries = {entry.lower() for entry in re.findall(r"^\| \**([^|*]+?)\** \|", glossary, re.MULTILINE)}
    docs = " ".join(page.read_text() for page in (repository / "docs").glob("*.md") if page.name != "glossary.md")
    used = {term for term in PROJECT_TERMS if re.search(rf"\b{re.escape(term)}s?\b", docs, re.IGNORECASE)}
    assert {term.lower() for term in used} - entries == set()
    assert len(entries) <= 42  # 40 entries, and the table's own head


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def _tried(): ...", "_tried is named by a participle"),
        ("def told(x): ...", "told is named by a participle"),
        ("class Workbench: ...", "Workbench: write MergeContext"),
        ("MOST_FRAMES = 3", "MOST_FRAMES: write MAX_"),
        ("LEAST_S = 3", "LEAST_S: write MIN_"),
        ("EVERY_S = 3", "EVERY_S: write INTERVAL_S"),
    ],
)
def test_find_name_violations_forbidden_name_is_found(tmp_path: Path, source: str, found: str):
    path = tmp_path / "module.py"
    path.write_text(source)
    assert [found in line for line in find_name_violations(path)] == [True]


@pytest.mark.parametrize(
    "source",
    ["def is_tried() -> bool: ...", "def pick_evictions(): ...", "@property\ndef closed(self): ...", "MAX_S = 1"],
)
def test_find_name_violations_standard_name_passes(tmp_path: Path, source: str):
    path = tmp_path / "module.py"
    path.write_text(source)
    assert list(find_name_violations(path)) == []


def test_is_bare_participle_verb_in_ed_is_none():
    assert [is_bare_participle(name) for name in ("embed", "feed", "evicted", "kept_bytes")] == [
        False,
        False,
        True,
        False,
    ]


@pytest.mark.parametrize("prose", ["whoever reads", "what it comes to", "on the card", "the model is told"])
def test_find_prose_violations_private_phrase_is_found(tmp_path: Path, prose: str):
    page, module = tmp_path / "page.md", tmp_path / "module.py"
    page.write_text(f"# Title\n\n{prose}\n")
    module.write_text(f'"""One.\n\n{prose}\n"""\n')
    assert [line.split(":")[1] for path in (page, module) for line in find_prose_violations(path)] == ["3", "3"]


def test_find_duplicate_classes_two_files_are_named(tmp_path: Path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.py").write_text("class Same: ...\nclass _Private: ...")
    assert [line.split(":")[0] for line in find_duplicate_classes(sorted(tmp_path.glob("*.py")))] == ["Same"]
