"""The page of the report: its figures, nothing asked for from outside, no markup out of names."""

import json
import re

import numpy as np
import pytest

from gemel import evaluation as caveats
from gemel.report.drawing import Series, draw_boxes, draw_curve, rows_of
from gemel.report.examples import worst, worst_examples
from gemel.report.geometry import (
    Axis,
    age_rows,
    byte_rows,
    error_type_rows,
    outcome_classes,
    outcome_rows,
    recall_rows,
    sharing_matrix,
    streaming_panels,
    swapping_rows,
    timeline_rows,
    top_sets,
)
from gemel.report.page import first_screen, render_report
from gemel.stream_eval import residency_timeline
from gemel.text import duration, percent, size
from models.data import Split
from models.predictions import Boxes, ClassPrediction, DetectionPrediction
from models.workload import Query

DEVICE = {"title": "A box", "clock": "virtual clock", "modelled": True, "sources": ["its data sheet"]}


def test_the_page_holds_the_figures_and_asks_for_nothing_from_outside(document):
    page = render_report(document, ["QUJD", "QUJE"])
    assert "url(data:image/jpeg;base64,QUJE)" in page
    for shown in ("64.6 %", "3 of 3", "bridge-cars", "min = 38.1 MiB", "Jetson Orin Nano"):
        assert shown in page
    assert not re.search(r"""(src|href)\s*=\s*["'](?!data:)""", page)
    assert "http" not in page.replace("http-equiv", "")


def test_names_from_a_bundle_cannot_smuggle_markup_into_the_page(document):
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


def test_a_name_cannot_turn_or_hide_what_stands_beside_it(document):
    turned = json.loads(json.dumps(document).replace("gate-people", "gate\\u202epeople\\u0007"))
    page = render_report(turned)
    assert "\u202e" not in page and "\u0007" not in page and "gate\\u202epeople\\x07" in page


def test_a_bundle_that_shares_nothing_still_has_a_page(document):
    document["shared"] = []
    assert "Nothing is shared" in render_report(document)


def test_the_parts_of_a_query_are_drawn_to_the_scale_of_the_largest_original():
    rows = byte_rows({
        "queries": [
            {"query": "a", "before": 200, "shared_part": 50, "private": 20},
            {"query": "b", "before": 100, "shared_part": 50, "private": 25},
        ]
    })  # fmt: skip
    assert [row["before_at"] for row in rows] == [100, 50]
    assert rows[1]["parts"] == [("shared_part", 25, 50), ("private", 12.5, 25)]
    assert rows[1]["after"] == 80


def test_the_sharing_matrix_counts_each_pair_s_common_bytes():
    shared = [
        {"bytes": 10, "shape": [5, 2], "members": [["a", "x.weight"], ["b", "y.weight"], ["c", "z.weight"]]},
        {"bytes": 30, "shape": [5, 6], "members": [["a", "u.weight"], ["b", "v.weight"]]},
    ]
    matrix = sharing_matrix(shared, ["a", "b", "c"])
    assert [[cell["bytes"] for cell in row] for row in matrix] == [[40, 40, 10], [40, 40, 10], [10, 10, 10]]
    assert matrix[0][1]["strength"] == 1 and matrix[0][2]["strength"] == 0.25
    assert [(row["saves"], row["cells"]) for row in top_sets(shared, ["a", "b", "c"])] == [
        (30, ["u", "v", ""]), (20, ["x", "y", "z"]),
    ]  # fmt: skip


def test_an_axis_holds_all_its_values_between_round_ticks():
    axis = Axis([0.943, 1.031])
    assert axis.low <= 0.943 and axis.high >= 1.031
    assert [round(value, 2) for value, _ in axis.ticks()] == [0.94, 0.96, 0.98, 1.0, 1.02, 1.04]
    assert (axis.at(0.5), axis.at(0.99), axis.at(2)) == (0, pytest.approx(50), 100)


def test_on_a_phone_labels_of_an_axis_leave_room_between_them(document):
    document["offline"][0] |= {"ratio": 0.943, "ci95": [0.943, 1.031]}
    axis = re.search(r'<div class="axis"[^>]*>(.*?)</div>', render_report(document))
    assert axis is not None
    named = re.findall(r'class="(\w+)" style="left: ([\d.]+)%"', axis[1])
    kept = [float(at) for kind, at in named if kind != "between"]
    assert len(named) == 6 and kept == [0, 40, 100], "two steps of six lie apart, the third is left out"


def test_what_is_wider_than_the_screen_fades_at_its_edge_and_can_be_reached_by_keyboard(document):
    page = render_report(document)
    narrow = page.count('<table class="three">')
    assert page.count('<div class="scroll" tabindex="0">') == page.count("<table") - narrow == 9
    assert "mask-image: linear-gradient(to right" in page


def test_over_a_single_clip_the_page_shows_no_interval(document):
    document["offline"][0]["ci95"] = None
    assert "one clip: no interval" in render_report(document)


def test_the_mean_over_queries_is_taken_seed_by_seed(document):
    mean = streaming_panels(document["streaming"], document["offline"])["mean"]
    least = mean["settings"][0]
    rows = [row for row in document["streaming"] if row["arm"] == "merged" and row["memory"] == "min"]
    by_seed = [sum(row["by_seed"][seed] for row in rows) / len(rows) for seed in range(3)]
    assert least["memory"] == "min"
    assert least["merged"]["spread"] == [min(by_seed), max(by_seed)]
    assert least["merged"]["accuracy"] == pytest.approx(sum(by_seed) / 3)


def test_swapping_is_told_per_processed_frame(document):
    rows = swapping_rows(document["swapping"])
    assert [row["memory"] for row in rows] == ["min", "min", "50%", "50%", "75%", "75%"]
    assert rows[0] == {"memory": "min", "arm": "originals", "processed": 0.4, "moved": 10**9 / 120}


def test_the_timeline_knows_when_all_of_a_query_is_resident():
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
def test_a_caveat_stands_where_its_reason_does_and_only_there(words, changes, swapping, unlabelled):
    assert any(words in line for line in caveats(offline(**changes), swapping, DEVICE, unlabelled, 3))
    assert not any(words in line for line in caveats(offline(), PRESSED, DEVICE, [], 3))


def test_the_clock_and_the_model_of_the_device_are_always_named():
    text = " ".join(caveats(offline(), PRESSED, DEVICE, [], 3))
    assert "virtual clock" in text and "A box is modelled from published" in text and "its data sheet" in text


def query(task):
    return Query("q", "cam", task, ("car", "bus"), "m", {}, 32, None, None, 5, 100, None, 0.0, 1, None, 0.95)


def test_examples_say_what_both_models_found_and_leave_out_what_scores_below_the_threshold():
    frames = [np.full((40, 60, 3), 90, np.uint8)] * 3
    box = (5.0, 5.0, 30.0, 30.0)
    split = Split("test", frames, (Boxes(), Boxes(("car",), (box,)), Boxes()), ("u",) * 3, (0.0, 1.0, 2.0))
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


def test_each_clip_gives_its_worst_frame_before_any_gives_two():
    scores = [(0.9, 0.1), (0.8, 0.0), (0.1, 0.5), (0.0, 1.0), (0.7, 0.0), (0.0, 0.0)]
    units = ["a", "a", "b", "b", "a", "c"]
    assert worst(scores, units, 3) == [0, 2, 5]
    assert worst(scores, units, 5) == [0, 1, 2, 5, 3], "the worst first; of what lost nothing, what is bad by itself"


def test_a_box_that_is_wrong_and_an_object_that_was_missed_are_seen_on_the_frame(document):
    boxed = document["examples"][0]
    original, merged = draw_boxes(boxed, "original", several=True), draw_boxes(boxed, "merged", several=True)
    assert '<rect class="missed"' in merged and '<rect class="merged alarm"' in merged and ">bus</text>" in merged
    assert 'class="truth"' in original and "missed" not in original and "alarm" not in original


def test_the_query_with_the_worst_frame_comes_first(document):
    page = render_report(document).split("Frames of the test footage")[1]
    assert page.index("square-<wbr>busy") < page.index("bridge-<wbr>cars"), "a class lost weighs more than half an F1"
    assert "merging costs 0.50 of F1 here" in page and "0 found, 1 missed, 1 false alarm" in page


def test_frames_stand_by_their_fate_and_add_up(document):
    rows = outcome_rows(document["ledger"])
    assert [part[:1] + part[2:] for part in rows[0]["parts"]] == [
        ("in time", 267), ("late", 3), ("dropped: deadline", 15), ("dropped: replaced", 9), ("pending", 6),
    ]  # fmt: skip
    assert rows[0]["received"] == 300 and sum(share for _, share, _ in rows[0]["parts"]) == pytest.approx(100)
    assert outcome_classes(rows)["dropped: replaced"] == "drop1" and outcome_classes(rows)["in time"] == "in-time"


def test_ages_lie_on_powers_of_ten_beside_what_the_query_allows(document):
    found = age_rows(document["streaming"], document["offline"], "min")
    assert found["ticks"] == [(1.0, 0.0), (10.0, 33.33), (100.0, 66.67), (1000.0, 100.0)]
    row = found["rows"][0]
    assert row["sla_at"] == 66.67 and row["arms"]["merged"]["at"][1] == pytest.approx(96.77)
    for one in document["streaming"]:
        one |= {f"age_p{share}_ms": None for share in (50, 95, 99)}
    assert age_rows(document["streaming"], document["offline"], "min")["rows"][0]["arms"] == {}
    assert "originals: no answer" in render_report(document)


def test_errors_are_drawn_to_the_scale_of_the_model_with_more_and_what_grew_is_marked(document):
    row = error_type_rows(document["offline"])[0]
    assert sum(count for _, _, count in row["bars"]["original"]) == 30
    assert sum(share for _, share, _ in row["bars"]["merged"]) == pytest.approx(100 * 29 / 30, abs=0.1)
    assert [one["kind"] for one in row["kinds"] if one["more"]] == ["class", "duplicate", "background"]
    assert [one["class"] for one in recall_rows(document["offline"])[0]["classes"]] == ["busy", "empty"]


def test_of_many_classes_those_that_fell_most_are_seen_at_once(document):
    one = document["offline"][2]["classes"][0]
    document["offline"][2]["classes"] = [
        one | {"class": f"item-{index}", "merged": 0.5 + index / 100} for index in reversed(range(50))
    ]
    (row,) = recall_rows(document["offline"])
    assert [one["class"] for one in row["classes"]][:2] == ["item-0", "item-1"] and len(row["rest"]) == 42
    assert "42 more" in render_report(document)


def test_the_first_screen_shows_those_who_lost_first_where_there_are_too_many(document):
    row = document["offline"][0]
    document["offline"] = [{**row, "query": f"q{index}", "met": index != 13, "ratio": 0.9} for index in range(14)]
    kept = first_screen(document)["kept"]
    assert [one["query"] for one in kept["rows"]][:2] == ["q13", "q0"] and kept["more"] == 6
    assert kept["rows"][0]["lost"] and (kept["met"], kept["of"]) == (13, 14)


def test_the_curve_names_every_memory_setting_in_rows_that_leave_room():
    points = [(nbytes, 0.5, 0.4, 0.6) for nbytes in (100, 104, 200)]
    drawn = draw_curve([Series("merged", "merged", points)], {100: "min", 104: "104B", 200: "75%"}, ("offline", 0.9))
    assert drawn is not None and all(f">{name}</text>" in drawn for name in ("min", "104B", "75%"))
    assert drawn.count("<circle") == 3 and drawn.count('class="path merged"') == 2
    assert rows_of([9, 12, 40, 93], apart=25) == [0, 1, 0, 0]
    assert draw_curve([Series("merged", "merged", [])], {}) is None


def test_the_wall_clock_stands_beside_the_virtual_one_only_where_it_was_measured(document):
    assert "0.71 / 0.73" in render_report(document)
    document["wall"] = None
    assert "By the wall clock" not in render_report(document)


def test_three_numbers_of_each_query_are_those_of_the_memory_asked_for(document):
    document["asked"] = {"memory": "75%", "memory_bytes": 70_000_000}
    part = render_report(document).split("Three numbers")[1].split("</table>")[0]
    cells = re.findall(r"<td[^>]*>(?:<b>)?([\d.]+)", part)
    assert cells[:3] == ["0.78", "0.70", "0.65"]
    assert len(cells) == 9


def test_without_streams_the_page_says_what_it_knows(document):
    document |= {"streaming": [], "side_by_side": [], "ledger": [], "swapping": [], "timeline": [], "wall": None}
    page = render_report(document)
    assert "Bytes before and after" in page and "Accuracy on the stream" not in page


def test_numbers_read_well():
    assert [size(n) for n in (0, 999, 44_800_000, 1.5e9)] == ["0 bytes", "999 bytes", "42.7 MiB", "1.4 GiB"]
    assert [duration(s) for s in (12, 185, 3725)] == ["12 s", "3 min 05 s", "1 h 02 min"]
    assert (percent(0.2578), percent(None)) == ("25.8 %", "-")
