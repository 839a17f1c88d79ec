"""The page of a report: its figures, no requests, no markup out of names; and the geometry of its pictures."""

import json
import re

import numpy as np
import pytest

from gemel.models.data import Split
from gemel.models.predictions import BoxLabels, ClassPrediction, DetectionPrediction
from gemel.models.workload import Query
from gemel.process import format_time
from gemel.report.conclusion import report_limits
from gemel.report.document import ClassificationExample, DetectionExample, Report, SharedWeight, WeightBytes
from gemel.report.drawing import Series, draw_boxes, draw_curve, label_rows
from gemel.report.examples import pick_worst, worst_examples
from gemel.report.geometry import (
    AgeAxis,
    Axis,
    byte_parts,
    largest_shared,
    mean_points,
    outcome_classes,
    outcome_rows,
    sharing_matrix,
)
from gemel.report.page import error_bars, first_screen, render_report, sorted_recalls
from gemel.text import duration, percent, size
from tests.docs.pages import REPOSITORY

KEYS = {
    "proven",
    "unchanged",
    "not proven",
    "f1",
    "balanced_accuracy",
    "detection",
    "classification",
    "originals",
    "merged",
    "original",
    "min",
}
"""Texts that are not a user's words: the report looks for them."""
STREAM_PARTS = ("streaming", "ledger", "transfers")


def render(document, photos=()):
    return render_report(Report.model_validate(document), photos)


def list_texts(value):
    """Every text that is a value in a document."""
    if isinstance(value, dict):
        return {text for one in value.values() for text in list_texts(one)}
    if isinstance(value, list):
        return {text for one in value for text in list_texts(one)}
    return {value} - KEYS if isinstance(value, str) else set()


def test_page_of_a_document_holds_its_figures_and_no_link(document):
    page = render(document, ["QUJD", "QUJE"])
    assert "url(data:image/jpeg;base64,QUJE)" in page
    for shown in ("65.0 %", "3 of 3", "bridge-cars", "min = 38.1 MiB", "Jetson Orin Nano"):
        assert shown in page
    assert not re.search(r"""(src|href)\s*=\s*["'](?!data:)""", page)
    assert "http" not in page.replace("http-equiv", "")


def test_page_shows_the_memory_of_the_process_beside_runs_and_weights(document):
    page = render(document)
    shown = ("originals", "133.5 MiB", "8.6 MiB", "114.4 MiB", "256.5 MiB")
    assert re.search("</td><td[^>]*>".join(map(re.escape, shown)), page)
    assert "the process itself takes 133.5 MiB besides" in page


def test_page_has_times_in_the_form_of_the_log(document):
    form = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{3})?(Z|[+-]\d\d:\d\d)"
    assert re.fullmatch(form, format_time(0.0)) and re.fullmatch(form, document["created_at"])
    page = render_report(Report.model_validate(document))
    assert page.count(document["created_at"]) == 2, "the subtitle and the last line"
    assert not re.search(r"\d{4}-\d\d-\d\d \d\d:\d\d", page)


def test_page_with_markup_in_any_text_escapes_it(document):
    texts = sorted(list_texts(document))
    hostile = json.dumps(document)
    for index, text in enumerate(texts):
        hostile = hostile.replace(json.dumps(text), json.dumps(f'"><b onload=x><script>{index}{text}'))
    page = render(json.loads(hostile))
    assert "<b onload" not in page and "<script" not in page and "&lt;script&gt;" in page


def test_page_with_control_characters_escapes_them(document):
    turned = json.loads(json.dumps(document).replace("gate-people", "gate\\u202epeople\\u0007"))
    page = render(turned)
    assert "\u202e" not in page and "\u0007" not in page and "gate\\u202epeople\\x07" in page


@pytest.mark.parametrize(
    ("changes", "shown", "hidden"),
    [
        ({"shared": []}, "Nothing is shared", "shared weights that save most"),
        ({key: [] for key in STREAM_PARTS}, "Weight bytes", "Accuracy on the stream"),
    ],
)
def test_page_without_a_part_leaves_its_section_out(document, changes, shown, hidden):
    page = render({**document, **changes})
    assert shown in page and hidden not in page


def test_page_says_what_is_proven_and_how_many_answers_are_as_before(document):
    document["offline"][0] |= {"state": "proven", "proven": True, "lower_end": 0.961, "from": "agreement"}
    page = render(document)
    assert "proven: at least 96.1 %, by agreement" in page and "answers as before on 90.0 %" in page


def test_byte_parts_are_fractions_of_the_largest_original(document):
    document["bytes"]["queries"][1] |= {"before": 100, "shared_part": 50, "private": 0}
    row = WeightBytes.model_validate(document["bytes"]).queries[1]
    assert byte_parts(row, 200) == [("shared_part", 25, 50)]


def test_sharing_matrix_diagonal_is_the_largest_cell():
    members = (["a", "b", "c"], ["a", "b"])
    shared = [
        SharedWeight(tensor="t", bytes=one, shape=[5, one], members=[[query, f"{query}{one}.weight"] for query in own])
        for one, own in zip((10, 30), members, strict=True)
    ]
    assert sharing_matrix(shared, ["a", "b", "c"]) == [[40, 40, 10], [40, 40, 10], [10, 10, 10]]
    assert [(row.saves, row.shape, row.cells) for row in largest_shared(shared, ["a", "b", "c"])] == [
        (30, "5×30", ["a30", "b30", ""]), (20, "5×10", ["a10", "b10", "c10"]),
    ]  # fmt: skip


def test_axis_ticks_are_round_and_hold_all_values():
    axis = Axis([0.943, 1.031])
    assert [round(value, 2) for value, _ in axis.ticks()] == [0.94, 0.96, 0.98, 1.0, 1.02, 1.04, 1.06]
    assert (axis.at(0.5), axis.at(1.0), axis.at(2)) == (0, pytest.approx(50), 100)


def test_page_red_is_only_what_falls_short():
    style = (REPOSITORY / "gemel/report/pages/style.css").read_text(encoding="utf-8")
    rules = re.findall(r"([^{}]+)\{[^{}]*var\(--bad\)", style)
    red = {word for rule in rules for word in re.findall(r"\.([\w-]+)", rule)}
    assert red == {"bad", "failed", "lost", "name", "row", "small", "verdict", "way", "worse"}


def test_age_axis_is_logarithmic():
    axis = AgeAxis([120.0, 1000.0])
    assert axis.ticks() == [(1.0, 0.0), (10.0, 33.33), (100.0, 66.67), (1000.0, 100.0)]
    assert axis.at(100.0) == 66.67 and axis.at(0.1) == 0 and AgeAxis([]).decades == 1


def test_page_without_results_of_an_arm_says_so(document):
    for one in document["streaming"]:
        one |= {f"age_p{share}_ms": None for share in (50, 95, 99)}
    assert "originals: no result" in render(document)


def test_axis_labels_on_a_phone_are_regular(document):
    document["offline"][0] |= {"ratio": 1.031, "lower_end": 0.943, "state": "proven", "proven": True, "from": "labels"}
    axis = re.search(r'<div class="axis"[^>]*>(.*?)</div>', render(document))
    assert axis is not None
    named = re.findall(r'class="(\w+)" style="left: ([\d.]+)%"', axis[1])
    kept = [float(at) for kind, at in named if kind != "between"]
    assert len(named) == 7 and kept == pytest.approx([0, 33.33, 66.67, 100])


def test_wide_tables_scroll_and_take_keyboard_focus(document):
    page = render(document)
    narrow = page.count('<table class="three">')
    assert page.count('<div class="scroll" tabindex="0">') == page.count("<table") - narrow == 9


@pytest.mark.parametrize(
    ("words", "changes", "processed", "unlabelled"),
    [
        ("bridge-cars: no evidence. Its original reaches 0.40", {"original": 0.4, "worth": False}, 120, []),
        ("bridge-cars: the target is met on test, but", {"state": "not proven"}, 120, []),
        ("bridge-cars: no human labels", {}, 120, ["bridge-cars"]),
        ("No pressure: Jetson Orin Nano 8 GB keeps up", {}, 300, []),
    ],
)
def test_limits_name_each_reason_only_when_it_holds(document, words, changes, processed, unlabelled):
    for row in document["offline"]:
        row["state"] = "unchanged"
    usual = report_limits(Report.model_validate(document), [])
    document["offline"][0] |= changes
    for row in document["transfers"]:
        row["processed"] = processed
    found = report_limits(Report.model_validate(document), unlabelled)
    assert any(words in line for line in found) and not any(words in line for line in usual)
    assert "virtual clock" in found[-2] and "is modelled from published" in found[-2] and "a data sheet" in found[-2]


def make_query(task):
    return Query("q", "cam", task, ("car", "bus"), "m", {}, 32, None, None, 5, 100, None, 0.0, 1, None, 0.95)


def test_examples_leave_out_boxes_below_the_threshold():
    frames = [np.full((40, 60, 3), 90, np.uint8)] * 3
    box = (5.0, 5.0, 30.0, 30.0)
    split = Split("test", frames, (BoxLabels(), BoxLabels(("car",), (box,)), BoxLabels()), ("u",) * 3, (0.0, 1.0, 2.0))
    sure, unsure = DetectionPrediction(("car",), (0.9,), (box,)), DetectionPrediction(("car",), (0.1,), (box,))
    assert split.labels is not None
    sides = {"original": [sure] * 3, "merged": [unsure] * 3}
    rows, photos = worst_examples(make_query("detection"), split, split.labels, sides, threshold=0.5)
    assert isinstance(rows[0], DetectionExample) and rows[0].time_s == 1.0, "the worst first"
    assert [row.lost for row in rows] == [1.0, -1.0, -1.0] and len(photos) == 3
    assert rows[0].truth[0].found == ["original"] and rows[0].merged == []
    assert [(one.name, one.score, one.right) for one in rows[0].original] == [("car", 0.9, True)]
    sides = {"original": [ClassPrediction("car", 0.9, (0.9, 0.1))], "merged": [ClassPrediction("bus", 0.9, (0.1, 0.9))]}
    split = Split("test", frames[:1], ("car",), ("u",), (0.0,))
    rows, _ = worst_examples(make_query("classification"), split, ["car"], sides, threshold=0.0)
    assert isinstance(rows[0], ClassificationExample) and rows[0].original.right and not rows[0].merged.right


def test_worst_frames_come_from_every_clip_first():
    scores = [(0.9, 0.1), (0.8, 0.0), (0.1, 0.5), (0.0, 1.0), (0.7, 0.0), (0.0, 0.0)]
    units = ["a", "a", "b", "b", "a", "c"]
    assert pick_worst(scores, units, 3) == [0, 2, 5]
    assert pick_worst(scores, units, 5) == [0, 1, 2, 5, 3], "of what lost nothing, what is bad by itself"


def test_boxes_mark_false_alarms_and_missed_objects(document):
    boxed = DetectionExample.model_validate(document["examples"][0])
    original, merged = draw_boxes(boxed, "original", several=True), draw_boxes(boxed, "merged", several=True)
    assert '<rect class="missed"' in merged and '<rect class="merged alarm"' in merged and ">bus</text>" in merged
    assert 'class="truth"' in original and "missed" not in original and "alarm" not in original


def test_example_groups_begin_with_the_worst_frame(document):
    page = render(document).split("Example frames")[1]
    assert page.index("square-<wbr>busy") < page.index("bridge-<wbr>cars"), "a class lost weighs more than half an F1"
    assert "merging costs 0.50 of F1 here" in page and "0 found, 1 missed, 1 false alarm" in page
    assert page.count("<figure") == 2
    for example in document["examples"]:
        example["lost"] = 0.0
    page = render(document)
    assert "merging cost nothing on any test frame" in page and "<figure" not in page, "no pairs of equal pictures"


def test_outcome_rows_add_up_to_received_frames(document):
    rows = outcome_rows(Report.model_validate(document).ledger)
    assert [(name, frames) for name, _, frames in rows[0].parts] == [
        ("in time", 267), ("late", 3), ("dropped: deadline", 15), ("dropped: replaced", 9), ("pending", 6),
    ]  # fmt: skip
    assert rows[0].received == 300 and rows[0].in_time == 0.89
    assert sum(share for _, share, _ in rows[0].parts) == pytest.approx(100)
    assert outcome_classes(rows)["dropped: replaced"] == "drop1" and outcome_classes(rows)["in time"] == "in-time"


def test_error_bars_are_parts_of_the_longer_one(document):
    bars = error_bars(Report.model_validate(document).offline[0])
    assert sum(count for _, _, count in bars["original"]) == 30
    assert sum(share for _, share, _ in bars["merged"]) == pytest.approx(100 * 29 / 30, abs=0.1)
    worse = re.findall(r'<td class="n bad">(\d+) <span', render(document).split("Error types")[1])
    assert worse[:3] == ["4", "1", "9"], "what the merged model makes more of"


def test_recalls_show_the_largest_losses_first(document):
    one = document["offline"][2]["classes"][0]
    document["offline"][2]["classes"] = [
        one | {"class": f"item-{index}", "merged": 0.5 + index / 100} for index in reversed(range(50))
    ]
    report = Report.model_validate(document)
    assert [one.name for one in sorted_recalls(report.offline[2])][:2] == ["item-0", "item-1"]
    assert "42 more" in render_report(report)


def test_first_screen_of_many_queries_shows_losers_first(document):
    row = document["offline"][0]
    document["offline"] = [{**row, "query": f"q{index}", "met": index != 13, "ratio": 0.9} for index in range(14)]
    document["streaming"] = []
    first = first_screen(Report.model_validate(document))
    assert [one.query for one in first.kept][:2] == ["q13", "q0"] and len(first.kept) == 8 and first.met == 13


def test_curve_labels_every_memory_setting():
    points = [(nbytes, 0.5, 0.4, 0.6) for nbytes in (100, 104, 200)]
    drawn = draw_curve([Series("merged", "merged", points)], {100: "min", 104: "104B", 200: "all"}, ("offline", 0.9))
    assert drawn is not None and all(f">{name}</text>" in drawn for name in ("min", "104B", "all"))
    assert drawn.count("<circle") == 3 and drawn.count('class="path merged"') == 2
    assert label_rows([9, 12, 40, 93], distance=25) == [0, 1, 0, 0]
    assert draw_curve([Series("merged", "merged", [])], {}) is None


def test_stream_table_is_for_the_headline_memory(document):
    document["headline"] = {"memory": "all", "memory_bytes": 70_000_000}
    part = render(document).split("Offline and streaming accuracy with")[1].split("</table>")[0]
    cells = re.findall(r"<td[^>]*>(?:<b>)?([\d.]+)", part)
    assert cells[:3] == ["0.78", "0.70", "0.65"] and len(cells) == 9


def test_sizes_durations_and_percentages_format():
    assert [size(n) for n in (0, 999, 44_800_000, 1.5e9)] == ["0 bytes", "999 bytes", "42.7 MiB", "1.4 GiB"]
    assert [duration(s) for s in (12, 185, 3725)] == ["12 s", "3 min 05 s", "1 h 02 min"]
    assert (percent(0.2578), percent(None)) == ("25.8 %", "-")


def test_mean_over_metrics_divides_by_the_originals_offline(document):
    report = Report.model_validate(document)
    rows = [row for row in report.streaming if row.arm == "merged" and row.memory == "min"]
    point = mean_points(report)["merged"][0]
    originals = {row.query: row.original for row in report.offline}
    assert point[1] == pytest.approx(sum(row.accuracy / originals[row.query] for row in rows) / 3)
    assert point[2] < point[1] < point[3]
    for row in document["offline"]:
        row["metric"] = "f1"
    plain = mean_points(Report.model_validate(document))["merged"][0]
    assert plain[1] == pytest.approx(sum(row.accuracy for row in rows) / 3)
