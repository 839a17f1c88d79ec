"""The page of the report: its figures, nothing asked for from outside, no markup out of names."""

import json
import re

import numpy as np
import pytest

from gemel.evaluation import report_limits
from gemel.report.drawing import Series, draw_boxes, draw_curve, label_rows
from gemel.report.examples import pick_worst, worst_examples
from gemel.report.geometry import (
    Axis,
    age_rows,
    byte_rows,
    error_type_rows,
    largest_shared,
    mean_points,
    outcome_classes,
    outcome_rows,
    recall_rows,
    sharing_matrix,
    timeline_rows,
)
from gemel.report.page import first_screen, render_report
from gemel.stream_eval import residency_timeline
from gemel.text import duration, percent, size
from models.data import Split
from models.predictions import BoxLabels, ClassPrediction, DetectionPrediction
from models.workload import Query

DEVICE = {"title": "A box", "clock": "virtual clock", "modelled": True, "sources": ["its data sheet"]}


def test_page_of_a_document_holds_its_figures_and_no_link(document):
    page = render_report(document, ["QUJD", "QUJE"])
    assert "url(data:image/jpeg;base64,QUJE)" in page
    for shown in ("65.0 %", "3 of 3", "bridge-cars", "min = 38.1 MiB", "Jetson Orin Nano"):
        assert shown in page
    assert not re.search(r"""(src|href)\s*=\s*["'](?!data:)""", page)
    assert "http" not in page.replace("http-equiv", "")


def test_page_with_markup_in_names_escapes_it(document):
    mark = "<script>x</script>"
    hostile = json.loads(json.dumps(document).replace("bridge-cars", mark).replace('"car"', json.dumps(f'"{mark}')))
    page = render_report({**hostile, "workload": "</title><script>"})
    assert "<script" not in page and "&lt;script&gt;" in page
    for told in each_text(document):  # one after the other, wherever it stands
        page = render_report(
            json.loads(json.dumps(document).replace(json.dumps(told), json.dumps(f'"><b onload=x>{told}')))
        )
        assert "<b onload" not in page, told


KEYS = {"f1", "balanced_accuracy", "detection", "classification", "originals", "merged", "original", "min"}
"""Texts that are not a user's words: the report looks for them."""


def each_text(value):
    """Every text that stands in a document as a value."""
    if isinstance(value, dict):
        return {text for one in value.values() for text in each_text(one)}
    if isinstance(value, list):
        return {text for one in value for text in each_text(one)}
    return {value} - KEYS if isinstance(value, str) else set()


def test_page_with_control_characters_escapes_them(document):
    turned = json.loads(json.dumps(document).replace("gate-people", "gate\\u202epeople\\u0007"))
    page = render_report(turned)
    assert "\u202e" not in page and "\u0007" not in page and "gate\\u202epeople\\x07" in page


def test_page_without_shared_weights_says_so(document):
    document["shared"] = []
    assert "Nothing is shared" in render_report(document)


def test_byte_rows_scale_to_the_largest_original():
    rows = byte_rows({
        "queries": [
            {"query": "a", "before": 200, "shared_part": 50, "private": 20},
            {"query": "b", "before": 100, "shared_part": 50, "private": 25},
        ]
    })  # fmt: skip
    assert [row["before_at"] for row in rows] == [100, 50]
    assert rows[1]["parts"] == [("shared_part", 25, 50), ("private", 12.5, 25)]
    assert rows[1]["after"] == 75


def test_sharing_matrix_diagonal_is_the_strongest_cell():
    shared = [
        {"bytes": 10, "shape": [5, 2], "members": [["a", "x.weight"], ["b", "y.weight"], ["c", "z.weight"]]},
        {"bytes": 30, "shape": [5, 6], "members": [["a", "u.weight"], ["b", "v.weight"]]},
    ]
    matrix = sharing_matrix(shared, ["a", "b", "c"])
    assert [[cell["bytes"] for cell in row] for row in matrix] == [[40, 40, 10], [40, 40, 10], [10, 10, 10]]
    assert matrix[0][0]["strength"] == matrix[0][1]["strength"] == 1 and matrix[0][2]["strength"] == 0.25
    assert [(row["saves"], row["cells"]) for row in largest_shared(shared, ["a", "b", "c"])] == [
        (30, ["u", "v", ""]), (20, ["x", "y", "z"]),
    ]  # fmt: skip


def test_axis_ticks_are_round_and_hold_all_values():
    axis = Axis([0.943, 1.031])
    assert axis.low <= 0.943 and axis.high >= 1.031
    assert [round(value, 2) for value, _ in axis.ticks()] == [0.94, 0.96, 0.98, 1.0, 1.02, 1.04, 1.06]
    assert (axis.at(0.5), axis.at(1.0), axis.at(2)) == (0, pytest.approx(50), 100)


def test_axis_labels_on_a_phone_are_regular(document):
    document["offline"][0] |= {"ratio": 0.943, "ci95": [0.943, 1.031]}
    axis = re.search(r'<div class="axis"[^>]*>(.*?)</div>', render_report(document))
    assert axis is not None
    named = re.findall(r'class="(\w+)" style="left: ([\d.]+)%"', axis[1])
    kept = [float(at) for kind, at in named if kind != "between"]
    assert len(named) == 7 and kept == pytest.approx([0, 33.33, 66.67, 100])


def test_wide_tables_scroll_and_take_keyboard_focus(document):
    page = render_report(document)
    narrow = page.count('<table class="three">')
    assert page.count('<div class="scroll" tabindex="0">') == page.count("<table") - narrow == 9
    assert "mask-image: linear-gradient(to right" in page


def test_page_over_a_single_clip_shows_no_interval(document):
    document["offline"][0]["ci95"] = None
    assert "one clip: no interval" in render_report(document)


def test_timeline_spans_begin_when_all_tensors_are_resident():
    from edge_runtime.policies import policy_named
    from edge_runtime.scheduler.costs import Costs, QueryCost
    from edge_runtime.simulation.simulator import simulate

    cost = {query: QueryCost((f"{query}-own", "both"), 0.1, 0, 10.0) for query in "ab"}
    costs = Costs(cost, {"a-own": 512, "b-own": 512, "both": 512}, 512.0)  # a tensor takes a second to load
    found = residency_timeline(simulate(costs, {"a": [1.0], "b": [2.0]}, 1024, policy_named("gemel")), window_s=5.0)
    spans = {row["query"]: (row["resident"], row["runs"]) for row in found["queries"]}
    assert spans["a"] == ([[3.0, pytest.approx(4.1)]], [[3.0, pytest.approx(3.1)]])
    assert spans["b"][0] == [[pytest.approx(4.1), 6.0]], "only its own tensor is loaded; the shared one stays"
    assert timeline_rows(found)[0]["resident"] == [(40.0, 22.0)]


def offline(**changes):
    row = {"query": "a", "metric": "f1", "original": 0.8, "units": 9, "worth": True, "met": True, "certain": True,
           "label_interval_s": 0.5}  # fmt: skip
    return [{**row, **changes}]


PRESSED, AT_EASE = [{"received": 100, "processed": 60}], [{"received": 100, "processed": 100}]


@pytest.mark.parametrize(
    ("words", "changes", "swapping", "unlabelled"),
    [
        ("a: no evidence. Its original reaches 0.40", {"original": 0.4, "worth": False}, PRESSED, []),
        ("a (3) has fewer than 5 clips", {"units": 3}, PRESSED, []),
        ("a: the target is met, but", {"certain": False}, PRESSED, []),
        ("a: no human labels", {}, PRESSED, ["a"]),
        ("No pressure: A box keeps up", {}, AT_EASE, []),
    ],
)
def test_limits_name_each_reason_only_when_it_holds(words, changes, swapping, unlabelled):
    assert any(words in line for line in report_limits(offline(**changes), swapping, DEVICE, unlabelled, 3))
    assert not any(words in line for line in report_limits(offline(), PRESSED, DEVICE, [], 3))


def test_limits_always_name_the_clock_and_device_model():
    text = " ".join(report_limits(offline(), PRESSED, DEVICE, [], 3))
    assert "virtual clock" in text and "A box is modelled from published" in text and "its data sheet" in text


def query(task):
    return Query("q", "cam", task, ("car", "bus"), "m", {}, 32, None, None, 5, 100, None, 0.0, 1, None, 0.95)


def test_examples_leave_out_boxes_below_the_threshold():
    frames = [np.full((40, 60, 3), 90, np.uint8)] * 3
    box = (5.0, 5.0, 30.0, 30.0)
    split = Split("test", frames, (BoxLabels(), BoxLabels(("car",), (box,)), BoxLabels()), ("u",) * 3, (0.0, 1.0, 2.0))
    sure, unsure = DetectionPrediction(("car",), (0.9,), (box,)), DetectionPrediction(("car",), (0.1,), (box,))
    assert split.labels is not None
    rows, photos = worst_examples(query("detection"), split, split.labels, [sure] * 3, [unsure] * 3, threshold=0.5)
    assert rows[0]["time_s"] == 1.0, "the worst first"
    assert [row["lost"] for row in rows] == [1.0, -1.0, -1.0] and len(photos) == 3
    assert rows[0]["truth"] == [{"class": "car", "box": list(box), "found": ["original"]}]
    assert rows[0]["original"] == [{"class": "car", "score": 0.9, "box": list(box), "right": True}]
    assert rows[0]["merged"] == [] and not rows[1]["original"][0]["right"]
    right, wrong = ClassPrediction("car", 0.9, (0.9, 0.1)), ClassPrediction("bus", 0.9, (0.1, 0.9))
    rows, _ = worst_examples(query("classification"), split, ["car"] * 3, [right] * 3, [wrong] * 3, threshold=0.0)
    assert rows[0]["original"] == {"class": "car", "score": 0.9, "right": True} and not rows[0]["merged"]["right"]


def test_worst_frames_come_from_every_clip_first():
    scores = [(0.9, 0.1), (0.8, 0.0), (0.1, 0.5), (0.0, 1.0), (0.7, 0.0), (0.0, 0.0)]
    units = ["a", "a", "b", "b", "a", "c"]
    assert pick_worst(scores, units, 3) == [0, 2, 5]
    assert pick_worst(scores, units, 5) == [0, 1, 2, 5, 3], (
        "the worst first; of what lost nothing, what is bad by itself"
    )


def test_boxes_mark_false_alarms_and_missed_objects(document):
    boxed = document["examples"][0]
    original, merged = draw_boxes(boxed, "original", several=True), draw_boxes(boxed, "merged", several=True)
    assert '<rect class="missed"' in merged and '<rect class="merged alarm"' in merged and ">bus</text>" in merged
    assert 'class="truth"' in original and "missed" not in original and "alarm" not in original


def test_example_groups_begin_with_the_worst_frame(document):
    page = render_report(document).split("Example frames")[1]
    assert page.index("square-<wbr>busy") < page.index("bridge-<wbr>cars"), "a class lost weighs more than half an F1"
    assert "merging costs 0.50 of F1 here" in page and "0 found, 1 missed, 1 false alarm" in page


def test_outcome_rows_add_up_to_received_frames(document):
    rows = outcome_rows(document["ledger"])
    assert [part[:1] + part[2:] for part in rows[0]["parts"]] == [
        ("in time", 267), ("late", 3), ("dropped: deadline", 15), ("dropped: replaced", 9), ("pending", 6),
    ]  # fmt: skip
    assert rows[0]["received"] == 300 and sum(share for _, share, _ in rows[0]["parts"]) == pytest.approx(100)
    assert outcome_classes(rows)["dropped: replaced"] == "drop1" and outcome_classes(rows)["in time"] == "in-time"


def test_age_rows_use_a_logarithmic_axis(document):
    found = age_rows(document["streaming"], document["offline"], "min")
    assert found["ticks"] == [(1.0, 0.0), (10.0, 33.33), (100.0, 66.67), (1000.0, 100.0)]
    row = found["rows"][0]
    assert row["sla_at"] == 66.67 and row["arms"]["merged"]["at"][1] == pytest.approx(96.77)
    for one in document["streaming"]:
        one |= {f"age_p{share}_ms": None for share in (50, 95, 99)}
    assert age_rows(document["streaming"], document["offline"], "min")["rows"][0]["arms"] == {}
    assert "originals: no result" in render_report(document)


def test_error_types_mark_what_merging_increased(document):
    row = error_type_rows(document["offline"])[0]
    assert sum(count for _, _, count in row["bars"]["original"]) == 30
    assert sum(share for _, share, _ in row["bars"]["merged"]) == pytest.approx(100 * 29 / 30, abs=0.1)
    assert [one["kind"] for one in row["kinds"] if one["more"]] == ["class", "duplicate", "background"]
    assert [one["class"] for one in recall_rows(document["offline"])[0]["classes"]] == ["busy", "empty"]


def test_recall_rows_show_the_largest_losses_first(document):
    one = document["offline"][2]["classes"][0]
    document["offline"][2]["classes"] = [
        one | {"class": f"item-{index}", "merged": 0.5 + index / 100} for index in reversed(range(50))
    ]
    (row,) = recall_rows(document["offline"])
    assert [one["class"] for one in row["classes"]][:2] == ["item-0", "item-1"] and len(row["rest"]) == 42
    assert "42 more" in render_report(document)


def test_first_screen_of_many_queries_shows_losers_first(document):
    row = document["offline"][0]
    document["offline"] = [{**row, "query": f"q{index}", "met": index != 13, "ratio": 0.9} for index in range(14)]
    kept = first_screen(document)["kept"]
    assert [one["query"] for one in kept["rows"]][:2] == ["q13", "q0"] and kept["more"] == 6
    assert kept["rows"][0]["lost"] and (kept["met"], kept["of"]) == (13, 14)


def test_curve_labels_every_memory_setting():
    points = [(nbytes, 0.5, 0.4, 0.6) for nbytes in (100, 104, 200)]
    drawn = draw_curve([Series("merged", "merged", points)], {100: "min", 104: "104B", 200: "all"}, ("offline", 0.9))
    assert drawn is not None and all(f">{name}</text>" in drawn for name in ("min", "104B", "all"))
    assert drawn.count("<circle") == 3 and drawn.count('class="path merged"') == 2
    assert label_rows([9, 12, 40, 93], distance=25) == [0, 1, 0, 0]
    assert draw_curve([Series("merged", "merged", [])], {}) is None


def test_page_shows_real_time_only_when_measured(document):
    assert "0.71 / 0.73" in render_report(document)
    document["realtime"] = None
    assert "Real-time check" not in render_report(document)


def test_side_by_side_table_is_for_the_headline_memory(document):
    document["headline"] = {"memory": "all", "memory_bytes": 70_000_000}
    part = render_report(document).split("Offline and streaming accuracy with")[1].split("</table>")[0]
    cells = re.findall(r"<td[^>]*>(?:<b>)?([\d.]+)", part)
    assert cells[:3] == ["0.78", "0.70", "0.65"]
    assert len(cells) == 9


def test_page_without_streams_shows_the_offline_part(document):
    document |= {"streaming": [], "side_by_side": [], "ledger": [], "transfers": [], "timeline": [], "realtime": None}
    page = render_report(document)
    assert "Weight bytes" in page and "Accuracy on the stream" not in page


def test_sizes_durations_and_percentages_format():
    assert [size(n) for n in (0, 999, 44_800_000, 1.5e9)] == ["0 bytes", "999 bytes", "42.7 MiB", "1.4 GiB"]
    assert [duration(s) for s in (12, 185, 3725)] == ["12 s", "3 min 05 s", "1 h 02 min"]
    assert (percent(0.2578), percent(None)) == ("25.8 %", "-")


def test_mean_over_metrics_divides_by_the_originals_offline(document):
    rows = [row for row in document["streaming"] if row["arm"] == "merged" and row["memory"] == "min"]
    plain = mean_points(document["streaming"], None)["merged"][0]
    assert plain[1] == pytest.approx(sum(row["accuracy"] for row in rows) / 3)
    divisors = {row["query"]: row["original"] for row in document["offline"]}
    relative = mean_points(document["streaming"], divisors)["merged"][0]
    assert relative[1] == pytest.approx(sum(row["accuracy"] / divisors[row["query"]] for row in rows) / 3)
    assert relative[2] < relative[1] < relative[3]
