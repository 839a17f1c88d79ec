"""`gemel report`: evaluations beside each other; what is damaged, hostile or of another workload is refused."""

import copy
import json
import random

import pytest

from gemel.cli import main
from gemel.models.errors import InputError
from gemel.report.comparison import compare_documents, render_comparison
from gemel.report.document import read_report
from tests.browser import page_of
from tests.hostile.mutations import VALUES, damage_bytes, damage_tree

MiB = 2**20


def change_result(document, method, after, lost=0.0):
    """The report of another bundle of this workload."""
    made = copy.deepcopy(document) | {"method": method}
    made["bundle"]["file"] = f"{method}.safetensors"
    made["bytes"] |= {"after": after, "saved_fraction": 1 - after / made["bytes"]["before"]}
    for row in made["offline"]:
        row["ratio"] -= lost
        row |= {"merged": row["original"] * row["ratio"], "met": row["ratio"] >= row["target"]}
    return made


@pytest.fixture
def reports(document, tmp_path):
    """Three reports: one small that falls short, one of middling size that is sound, the largest."""
    asked = [("none", 10 * MiB, 0.2), ("wide", 30 * MiB, 0.0), ("gemel", 60 * MiB, 0.0)]
    paths = []
    for index, one in enumerate(change_result(document, *words) for words in asked):
        (tmp_path / f"r{index}").mkdir()
        paths.append(tmp_path / f"r{index}" / "report.json")
        paths[-1].write_text(json.dumps(one))
    return paths


def compare(capsys, *words):
    """Exit code, standard output, and the line of an error."""
    code = main(["report", *map(str, words)])
    printed = capsys.readouterr()
    return code, printed.out, printed.err.strip()


def test_answer_is_the_fewest_bytes_that_meet_all_targets(reports, tmp_path, capsys):
    out = tmp_path / "page.html"
    code, printed, _ = compare(capsys, reports[0], reports[1].parent, reports[2], "-o", out, "--json")
    found = json.loads(printed)
    assert code == 0 and found["answer"].startswith("Fewest bytes with every accuracy target met: B (wide.safetensors")
    kept = {one["letter"]: (one["met"], one["of"]) for one in found["reports"]}
    assert kept == {"A": (0, 3), "B": (3, 3), "C": (3, 3)}
    page = out.read_text()
    assert "78.0 % (0 of 3)" in page and "30.0 MiB" in page
    assert "http" not in page and "<script" not in page
    means = {(row["letter"], row["memory"]): row["originals"] for row in found["streaming"]}
    assert found["relative"] and means["B", "min"] == pytest.approx(0.57, abs=0.01)


def test_answer_where_no_report_meets_all_targets_says_so(reports, document):
    found = compare_documents([(reports[0], read_report(reports[0]))])
    assert found.answer == "None meets every accuracy target; A (none.safetensors, method none) meets most, 0 of 3."


def test_differences_besides_the_merging_are_named(reports):
    def compare_again():
        return compare_documents([(path, read_report(path)) for path in reports]).differences

    assert compare_again() == []
    documents = [json.loads(path.read_text()) for path in reports]
    documents[1]["offline"][0]["original"] = 0.5
    documents[2]["device"]["title"] = "A larger box"
    for path, one in zip(reports, documents):
        path.write_text(json.dumps(one))
    found = compare_again()
    assert (
        found[0].startswith("B was evaluated against other originals than A") and "0.500 instead of 0.800" in found[0]
    )
    assert found[1].startswith("The devices differ (A: Jetson Orin Nano 8 GB; B:")


@pytest.mark.parametrize(
    ("harm", "expected"),
    [
        ({"workload": "harbour"}, "workload: is of workload 'harbour'"),
        ({"offline": 2}, "offline: does not evaluate the same queries as"),
        ({"format": 1}, "format: is no report of this version's gemel eval; evaluate again"),
        ({"bytes": {}}, "bytes.before: this key is missing"),
        ({"memory_bytes": 1}, "streaming: memory min is not the same bytes in all rows"),
        ({"streaming": -1}, "streaming: the rows of memory all are not of both arms and all queries, once each"),
    ],
)
def test_incomparable_reports_are_refused_in_one_line(reports, tmp_path, capsys, harm, expected):
    kept = json.loads(reports[1].read_text())
    for key, value in harm.items():
        kept[key] = kept[key][:value] if key in ("offline", "streaming") else value
    kept["streaming"][0]["memory_bytes"] = harm.get("memory_bytes", kept["streaming"][0]["memory_bytes"])
    if "offline" in harm:
        kept["streaming"] = [row for row in kept["streaming"] if row["query"] != "square-busy"]
    reports[1].write_text(json.dumps(kept))
    code, _, error = compare(capsys, *reports, "-o", tmp_path / "page.html")
    assert code == 2 and len(error.splitlines()) == 1 and str(reports[1]) in error and expected in error
    assert not (tmp_path / "page.html").exists()


def test_report_with_too_many_memory_settings_is_refused(reports):
    kept = json.loads(reports[0].read_text())
    kept["streaming"] = [row | {"memory": f"{size}MiB"} for size in range(101) for row in kept["streaming"][:6]]
    reports[0].write_text(json.dumps(kept))
    with pytest.raises(InputError, match="streaming: more than 100 memory settings"):
        read_report(reports[0])


def test_page_is_never_written_over_a_report(reports, tmp_path, capsys):
    before = reports[0].read_bytes()
    code, _, error = compare(capsys, reports[0], "-o", reports[0])
    assert code == 2 and "is one of the reports" in error and reports[0].read_bytes() == before
    code, _, error = compare(capsys, tmp_path / "none.json", "-o", tmp_path / "page.html")
    assert code == 2 and "none.json" in error and not (tmp_path / "page.html").exists()


def test_comparison_with_markup_in_names_escapes_it(reports, tmp_path, capsys):
    for path in reports[:2]:
        path.write_text(path.read_text().replace("gate-people", "<img src=x>").replace('"wide"', '"</style><script>"'))
    assert compare(capsys, *reports[:2], "-o", tmp_path / "page.html")[0] == 0
    page = (tmp_path / "page.html").read_text()
    assert "<img" not in page and "<script" not in page and page.count("</style>") == 1


def test_damaged_report_is_refused_or_renders_whole(reports, tmp_path):
    sound, tree = reports[0].read_bytes(), json.loads(reports[0].read_text())
    refused = 0
    for seed in range(80):
        drawn = random.Random(seed)
        if seed % 4:
            reports[0].write_text(json.dumps(damage_tree(tree, drawn, VALUES), default=str))
        else:
            reports[0].write_bytes(damage_bytes(sound, drawn))
        try:
            page = render_comparison(compare_documents([(reports[0], read_report(reports[0]))]))
            assert page.endswith("</html>")
        except InputError as error:
            assert "\n" not in str(error) and str(reports[0]) in str(error)
            refused += 1
    assert 10 < refused < 80


def test_comparison_page_fits_a_phone_and_requests_nothing(browser, reports, tmp_path, capsys):
    page_path = tmp_path / "page.html"
    assert compare(capsys, *reports, "-o", page_path)[0] == 0
    for width in (1280, 390):
        with page_of(browser, width, "dark", own=page_path.as_uri()) as (page, wrong):
            page.goto(page_path.as_uri())
            assert page.evaluate("document.documentElement.scrollWidth - innerWidth") == 0 and wrong == []
