"""Which of two states of a merge is the better one."""

from __future__ import annotations

from merger.core.merit import merit


def test_all_that_are_almost_there_count_more_than_one_that_is() -> None:
    required = dict.fromkeys("abc", 0.95)
    almost, one = {"a": 0.94, "b": 0.93, "c": 0.94}, {"a": 1.0, "b": 0.3, "c": 0.3}
    assert merit(almost, required) > merit(one, required)
    assert merit({"a": 1.2, "b": 0.9, "c": 0.9}, required) == merit({"a": 0.95, "b": 0.9, "c": 0.9}, required)
