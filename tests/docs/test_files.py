"""docs/files.md: its lists are made of tests/files_table.csv, and each row names a test that exists."""

from __future__ import annotations

import pytest

from tests.docs.files import PAGE, TABLE, find_tests, read_rows, render_files

FIX = "run python -m tests.docs.files"


def test_files_page_holds_the_lists() -> None:
    assert TABLE.findall(PAGE.read_text(encoding="utf-8")) == [render_files()], FIX


def test_files_table_inputs_are_unique() -> None:
    inputs = [row["input"] for row in read_rows()]
    assert sorted(set(inputs)) == sorted(inputs)


@pytest.mark.parametrize("row", read_rows(), ids=lambda row: row["input"])
def test_files_table_row_is_full_and_names_an_existing_test(row: dict[str, str]) -> None:
    path, _, name = row["test"].partition("::")
    assert row["what happens"]
    assert name.partition("[")[0] in find_tests(path), f"{path} has no {name}"
