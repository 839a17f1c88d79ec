"""docs/results.md, the README's table and benchmarks/results are what the records come to."""

import json
import re

import pytest

from benchmarks import results
from benchmarks.catalogue import weigh_workload
from benchmarks.schedule.cases import catalogue


def test_written_files_equal_the_records():
    stale = [path.name for path, text in results.build_files().items() if path.read_text(encoding="utf-8") != text]
    assert not stale, "run `python -m benchmarks.results`"


def test_transcribed_records_name_command_machine_and_date():
    for path in (results.MEASURED / "transcribed").glob("*.json"):
        one = json.loads(path.read_text(encoding="utf-8"))
        assert one["transcribed"] is True and one["command"] and one["machine"], path.name
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", one["date"]), path.name
        assert {len(row) for row in one["rows"]} == {len(one["heads"])}, path.name


def test_fill_page_writes_the_named_columns_and_rows():
    table = results.Table("`do it`; here; today", ("one", "two", "three"), [("p", 0.5, 1), ("q", 0.25, 2)])
    page = "a\n<!-- table: x | one, three | two=0.250 -->\nold\n<!-- end -->\nb\n<!-- table: x -->\n<!-- end -->\n"
    filled = results.fill_page(page, {"x": table})
    assert "-->\n| one | three |\n| --- | --- |\n| q | 2 |\n<!-- end -->\nb" in filled
    assert "| p | 0.500 | 1 |\n| q | 0.250 | 2 |" in filled and "old" not in filled
    for marker in ("y", "x | four", "x | one | four=1"):
        with pytest.raises(KeyError):
            results.fill_page(f"<!-- table: {marker} -->\n<!-- end -->", {"x": table})


def test_table_as_csv_and_html_escapes_its_cells():
    table = results.Table("source", ("a, b", "<c>"), [("x", True)])
    assert table.csv() == '"a, b",<c>\nx,yes\n'
    assert "&lt;c&gt;" in table.html("name") and "<td>yes</td>" in table.html("name")


def test_check_names_stale_files_and_writes_nothing(tmp_path, capsys):
    path = tmp_path / "new" / "page.md"
    assert results.main(["--check"], lambda: {path: "new"}) == 1
    assert not path.exists() and "differs from the records" in capsys.readouterr().out
    assert results.main([], lambda: {path: "new"}) == 0 and path.read_text() == "new"
    assert results.main(["--check"], lambda: {path: "new"}) == 0


def test_catalogue_record_equals_the_code():
    record = json.loads((results.MEASURED / "paper" / "catalogue.json").read_text(encoding="utf-8"))["catalogue"]
    path = next(one for one in catalogue() if one.stem == "low-1")
    assert weigh_workload(path) == next(one for one in record if one["workload"] == "low-1")
