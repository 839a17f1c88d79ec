"""The page of the report: its figures, nothing asked for from outside, no markup out of names."""

import json
import re

import numpy as np
import pytest

from gemel.evaluation.arms import timeline
from gemel.evaluation.caveats import caveats
from gemel.report.figures import (
    Axis,
    byte_rows,
    sharing_matrix,
    streaming_panels,
    swapping_rows,
    timeline_rows,
    top_sets,
)
from gemel.report.frames import examples
from gemel.report.page import render
from gemel.text import duration, percent, size
from models.frames.data import Split
from models.tasks import Boxes, ClassAnswer, DetectionAnswer
from models.workload import Query

DEVICE = {"title": "A box", "clock": "virtual clock", "modelled": True, "sources": ["its data sheet"]}


def test_the_page_holds_the_figures_and_asks_for_nothing_from_outside(document):
    page = render(document, [{"query": "gate-people", "caption": "clip", "pictures": ["QUJD"]}])
    for shown in ("64.6 %", "3 of 3", "bridge-cars", "min = 38.1 MiB", "Jetson Orin Nano"):
        assert shown in page
    assert not re.search(r"""(src|href)\s*=\s*["'](?!data:)""", page)
    assert "http" not in page.replace("http-equiv", "")


def test_names_from_a_bundle_cannot_smuggle_markup_into_the_page(document):
    hostile = json.loads(json.dumps(document).replace("bridge-cars", "<script>x</script>"))
    page = render({**hostile, "workload": "</title><script>"})
    assert "<script" not in page and "&lt;script&gt;" in page


def test_a_bundle_that_shares_nothing_still_has_a_page(document):
    document["shared"] = []
    assert "Nothing is shared" in render(document)


def test_the_parts_of_a_query_are_drawn_to_the_scale_of_the_largest_original():
    rows = byte_rows({
        "queries": [
            {"query": "a", "before": 200, "shared_part": 50, "private": 20, "residual": 0},
            {"query": "b", "before": 100, "shared_part": 50, "private": 25, "residual": 5},
        ]
    })  # fmt: skip
    assert [row["before_at"] for row in rows] == [100, 50]
    assert rows[1]["parts"] == [("shared_part", 25, 50), ("private", 12.5, 25), ("residual", 2.5, 5)]
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
    axis = re.search(r'<div class="axis"[^>]*>(.*?)</div>', render(document))
    assert axis is not None
    named = re.findall(r'class="(\w+)" style="left: ([\d.]+)%"', axis[1])
    kept = [float(at) for kind, at in named if kind != "between"]
    assert len(named) == 6 and kept == [0, 40, 100], "two steps of six lie apart, the third is left out"


def test_what_is_wider_than_the_screen_fades_at_its_edge_and_can_be_reached_by_keyboard(document):
    page = render(document)
    assert page.count('<div class="scroll" tabindex="0">') == page.count("<table") == 5
    assert "mask-image: linear-gradient(to right" in page


def test_over_a_single_clip_the_page_shows_no_interval(document):
    document["offline"][0]["ci95"] = None
    assert "one clip: no interval" in render(document)


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
    assert [row["memory"] for row in rows] == ["min", "50%", "75%"]
    assert rows[0]["originals"] == {"processed": 0.4, "moved": 10**9 / 120}


def test_the_timeline_knows_when_all_of_a_query_is_resident():
    from edge_runtime.policies import policy_named
    from edge_runtime.rehearsal.simulator import simulate
    from edge_runtime.schedule.costs import Costs, QueryCost

    cost = {query: QueryCost((f"{query}-own", "both"), 0.1, 0, 10.0) for query in "ab"}
    costs = Costs(cost, {"a-own": 512, "b-own": 512, "both": 512}, 512.0)  # a tensor takes a second to load
    found = timeline(simulate(costs, {"a": [1.0], "b": [2.0]}, 1024, policy_named("gemel")), window_s=5.0)
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


def test_examples_show_both_models_and_leave_out_what_scores_below_the_threshold():
    frames = [np.full((40, 60, 3), 90, np.uint8)] * 3
    box = (5.0, 5.0, 30.0, 30.0)
    split = Split("test", frames, (Boxes(), Boxes(("car",), (box,)), Boxes()), ("u",) * 3, (0.0, 1.0, 2.0))
    sure, unsure = DetectionAnswer(("car",), (0.9,), (box,)), DetectionAnswer(("car",), (0.1,), (box,))
    assert split.truths is not None
    found = examples(query("detection"), split, split.truths, [sure] * 3, [unsure] * 3, threshold=0.5)
    assert found[0]["caption"] == "u at 1.0 s: 1 in truth (white), 1 original, 0 merged", "the worst first"
    assert [example["lost"] for example in found] == [1.0, -1.0]
    assert len(found[0]["pictures"]) == 2
    right, wrong = ClassAnswer("car", 0.9, (0.9, 0.1)), ClassAnswer("bus", 0.9, (0.1, 0.9))
    found = examples(query("classification"), split, ["car"] * 3, [right] * 3, [wrong] * 3, threshold=0.0)
    assert found[0]["caption"].startswith("of 3 frames, 3 right by the original and 0 merged")


def test_numbers_read_well():
    assert [size(n) for n in (0, 999, 44_800_000, 1.5e9)] == ["0 bytes", "999 bytes", "42.7 MiB", "1.4 GiB"]
    assert [duration(s) for s in (12, 185, 3725)] == ["12 s", "3 min 05 s", "1 h 02 min"]
    assert (percent(0.2578), percent(None)) == ("25.8 %", "-")
