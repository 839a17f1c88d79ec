"""What every case is tested with in `make test-all`, and a few of them stand for in `make test`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def every(cases: Iterable[Any], few: Iterable[Any]) -> list[Any]:
    """All cases as parameters of a test, those that are not among the few marked as exhaustive."""
    cases, few = list(cases), set(few)
    assert few < set(cases), "the few are some of the cases"
    return [case if case in few else pytest.param(case, marks=pytest.mark.exhaustive) for case in cases]
