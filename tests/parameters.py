"""Parametrisation with all cases in `make test-all` and a few of them in `make test`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import cycle
from typing import Any

import pytest


def every(cases: Iterable[Any], few: Iterable[Any]) -> list[Any]:
    """All cases as parameters of a test, those that are not among the few marked as exhaustive.

    A case of several parameters is a tuple.
    """
    cases, few = list(cases), list(few)
    assert len(few) < len(cases) and all(case in cases for case in few), "the few are some of the cases"
    return [case if case in few else _exhaustive(case) for case in cases]


def one_in(step: int, cases: Iterable[Any]) -> list[Any]:
    """All cases as parameters of a test, of each `step` all but the first marked as exhaustive."""
    return [_exhaustive(case) if index % step else case for index, case in enumerate(cases)]


def all_pairs(rows: Iterable[Any], columns: Iterable[Any], chosen: Sequence[Any] | None = None) -> list[Any]:
    """Every row with every column as parameters of a test; all marked as exhaustive but each column once, with the
    chosen rows (without: all) in turn.
    """
    rows, columns = list(rows), list(columns)
    turns = zip(cycle(chosen or rows), columns, strict=False)
    return every([(row, column) for row in rows for column in columns], list(turns))


def _exhaustive(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.exhaustive)
