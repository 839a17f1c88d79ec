"""The docs name everything that is registered: engines, policies, methods, sinks, decoders, tasks, checks."""

from __future__ import annotations

import inspect
import re

import pytest

from gemel import testing
from gemel.models.plugins import GROUPS, find_entries
from gemel.models.preprocess import NORMALISATIONS
from tests.docs.pages import REPOSITORY

DOCS = "\n".join(path.read_text(encoding="utf-8") for path in sorted((REPOSITORY / "docs").glob("*.md")))
CONTRIBUTING = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
REGISTERED = {
    **{group: find_entries(group) for group in GROUPS},
    "preprocess": NORMALISATIONS,
}


@pytest.mark.parametrize("kind", REGISTERED)
def test_docs_name_everything_that_is_registered(kind: str) -> None:
    missing = [name for name in REGISTERED[kind] if not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", DOCS)]
    assert not missing, f"no page names the {kind} {missing}"


def test_contributing_names_every_check() -> None:
    checks = [name for name, _ in inspect.getmembers(testing, inspect.isfunction) if re.fullmatch(r"check_\w+", name)]
    own = [
        name for name in checks if getattr(testing, name).__module__ == testing.__name__ and name != "check_decision"
    ]
    assert len(own) == 6 and all(f"`{name}`" in CONTRIBUTING for name in own)
