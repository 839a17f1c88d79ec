"""docs/figures.md holds what was recorded: each table and picture as the script writes it, each with its source."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import figures


def test_tables_and_pictures_are_those_of_the_recorded_json() -> None:
    stale = [path.name for path, text in figures.written().items() if path.read_text(encoding="utf-8") != text]
    assert not stale, "run `python -m benchmarks.figures`"


def test_every_recorded_table_stands_in_the_docs_once(repository: Path) -> None:
    page = (repository / "docs" / "figures.md").read_text(encoding="utf-8")
    shown = [name for _, name, _, _ in figures.MARKED.findall(page)]
    recorded = {path.stem for path in (figures.MEASURED / "transcribed").glob("*.json")}
    assert len(shown) == len(set(shown))
    scheduled = figures.MEASURED / "schedule"
    worked_out = {*figures.schedules(scheduled), *figures.played(scheduled), *figures.services(figures.MEASURED)}
    worked_out |= {*figures.compressed(figures.MEASURED / "compression")}
    assert not recorded & worked_out and worked_out <= set(shown)
    assert recorded - {"junction"} == {name for name in shown if not name.startswith("merge")} - worked_out


def test_a_transcribed_table_says_by_what_on_what_and_when_it_was_measured() -> None:
    for path in (figures.MEASURED / "transcribed").glob("*.json"):
        one = json.loads(path.read_text(encoding="utf-8"))
        assert one["transcribed"] is True and one["command"] and one["machine"], path.name
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", one["date"]), path.name
        assert {len(row) for row in one["rows"]} == {len(one["heads"])}, path.name


def test_a_table_is_written_between_its_marks_and_nothing_else_is_touched() -> None:
    page = "a\n<!-- table: x -->\nold\n<!-- end -->\nb\n"
    filled = figures.filled(page, {"x": ("`do it`; here; today", ("one", "two"), [("p", 0.5)])})
    table = "| one | two |\n| --- | --- |\n| p | 0.500 |\n\n`do it`; here; today."
    assert filled == f"a\n<!-- table: x -->\n{table}\n<!-- end -->\nb\n"
    with pytest.raises(KeyError):
        figures.filled(page, {})


def test_check_names_what_differs_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "page.md"
    path.write_text("old")
    assert figures.main(["--check"], lambda: {path: "new"}) == 1
    assert path.read_text() == "old" and "is not as recorded" in capsys.readouterr().out
    assert figures.main([], lambda: {path: "new"}) == 0 and path.read_text() == "new"
    assert figures.main(["--check"], lambda: {path: "new"}) == 0


def test_the_readme_claims_what_the_first_table_has(repository: Path) -> None:
    page = (repository / "docs" / "figures.md").read_text(encoding="utf-8")
    rows = [row.split(" | ") for row in page.split("<!-- table: merge -->")[1].split("\n\n")[0].strip().splitlines()]
    ours = [row for row in rows if row[1] == "0.95" and row[2] == "wide"]
    saved = {round(100 * float(row[5].split()[0])) for row in ours}
    readme = (repository / "README.md").read_text("utf-8")
    said = re.search(r"(\d+) to (\d+) % of what sharing can, (.*?) % of the bytes", " ".join(readme.split()))
    assert said is not None
    least, most, listed = said.groups()
    assert set(map(int, re.findall(r"\d+", listed))) == saved and len(ours) == 3
    shares = [round(100 * float(row[4].split()[0])) for row in ours]
    assert (int(least), int(most)) == (min(shares), max(shares)), "of the ceiling"
    assert all(met.split(" of ")[0] == met.split(" of ")[1] for met in (row[7] for row in ours))
