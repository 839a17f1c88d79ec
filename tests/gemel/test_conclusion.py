"""The report's conclusion: what to ship, with what certainty, and which queries merging made worse."""

import json

import pytest

from gemel.report import conclusion
from gemel.report.conclusion import Tone
from gemel.report.device import stream_scores
from gemel.report.document import Report
from gemel.report.page import render_report
from gemel.summaries import conclusion_text


def draw_conclusion(document):
    return conclusion.draw_conclusion(Report.model_validate(document))


def render(document):
    return render_report(Report.model_validate(document))


@pytest.fixture
def proven(document):
    """A document whose queries are all proven, all with one metric."""
    for row in document["offline"]:
        row |= {"state": "proven", "proven": True, "lower_end": 0.96, "from": "agreement", "metric": "f1"}
    for query in ("bridge-cars", "gate-people", "square-busy"):
        set_streaming(document, query, "all", 0.70, 0.70)
    return document


def set_streaming(document, query, memory, originals, merged):
    for row in document["streaming"]:
        if (row["query"], row["memory"]) == (query, memory):
            row["accuracy"] = {"originals": originals, "merged": merged}[row["arm"]]


def test_conclusion_with_proven_queries_ships_in_green(proven):
    found = draw_conclusion(proven)
    assert found.sentence == (
        "Your device (a modelled Jetson Orin Nano 8 GB) holds all originals; merging frees 74.4 MiB and changes "
        "nothing else. Below 66.8 MiB it helps: with 38.1 MiB it lifts accuracy on the stream from 0.46 to 0.71. "
        "Ship it: all three queries meet their accuracy target."
    )
    assert (found.tone, found.worse) == (Tone.GOOD, ())


def test_conclusion_with_an_unproven_query_says_what_it_needs_and_is_not_green(proven):
    proven["offline"][1] |= {"state": "not proven", "proven": False, "needs": "9 minutes more of footage"}
    found = draw_conclusion(proven)
    assert (
        "Get more footage: all three queries meet their accuracy target, 2 of 3 proven or unchanged; gate-people needs "
        "9 minutes more of footage."
    ) in found.sentence
    assert found.tone is Tone.MIXED and len(found.ship) == 3


def set_all_streaming(document, memory, originals, merged):
    for query in ("bridge-cars", "gate-people", "square-busy"):
        set_streaming(document, query, memory, originals, merged)


def test_conclusion_where_merging_brings_nothing_on_the_stream_says_so(proven):
    for memory in ("min", "50%"):
        set_all_streaming(proven, memory, 0.69, 0.69)
    assert draw_conclusion(proven).sentence.startswith(
        "Your device (a modelled Jetson Orin Nano 8 GB) holds all originals; merging frees 74.4 MiB and changes "
        "nothing else. Below 66.8 MiB it brings nothing on the stream either: accuracy on the stream 0.69 both ways."
    )


def test_conclusion_with_room_for_all_calls_a_gain_that_of_training(proven):
    set_all_streaming(proven, "all", 0.56, 0.59)
    assert "merging frees 74.4 MiB and lifts accuracy on the stream from 0.56 to 0.59, by training alone" in (
        draw_conclusion(proven).sentence
    )


def test_conclusion_where_merging_harms_the_stream_says_at_which_memory(proven):
    set_all_streaming(proven, "50%", 0.69, 0.69)
    set_all_streaming(proven, "min", 0.60, 0.55)
    assert "Below 66.8 MiB it harms: with 38.1 MiB it lowers accuracy on the stream from 0.60 to 0.55." in (
        draw_conclusion(proven).sentence
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": {"memory_bytes": 100_000_000}},
         "Your device (a modelled Jetson Orin Nano 8 GB) has 47.7 MiB for weights and workspace, and all originals "
         "need 66.8 MiB; merging frees 74.4 MiB."),
        ({"device": {"memory_bytes": 0}}, "All originals need 66.8 MiB at once; merging frees 74.4 MiB."),
        ({"headline": {"memory": "2GB", "memory_bytes": 2 * 10**9}}, "holds all originals; merging frees 74.4 MiB"),
        ({"streaming": []}, "Merging frees 74.4 MiB of weights; no streams were simulated."),
    ],
)  # fmt: skip
def test_conclusion_begins_with_what_the_device_holds(proven, changes, words):
    for key, value in changes.items():
        proven[key] = {**proven[key], **value} if isinstance(value, dict) else value
    assert words in draw_conclusion(proven).sentence.split(" Below")[0]


def test_weak_original_is_named_and_in_no_mean(proven):
    proven["offline"][0] |= {"original": 0.438, "merged": 0.586, "ratio": 1.337}
    set_streaming(proven, "bridge-cars", "min", 0.1, 0.9)
    sentence = draw_conclusion(proven).sentence
    assert sentence.endswith(
        "Weak original: bridge-cars (0.44 F1, merged 0.59); to keep its accuracy is no success: train it longer first."
    )
    assert "it lifts accuracy on the stream from 0.47 to 0.72" in sentence
    page = render(proven)
    assert "weak original: 0.44" in page and "without the weak bridge-cars" in page
    for row in proven["offline"]:
        row["original"] = 0.438
    assert "No original is strong enough for a figure on the stream." in draw_conclusion(proven).sentence


def test_scores_over_different_metrics_are_shares_of_offline_accuracy(document):
    scores = stream_scores(Report.model_validate(document), "min")
    offline = {row["query"]: row["original"] for row in document["offline"]}
    rows = [row for row in document["streaming"] if row["memory"] == "min" and row["arm"] == "merged"]
    assert scores.relative
    assert scores.merged == pytest.approx(sum(row["accuracy"] / offline[row["query"]] for row in rows) / 3)
    assert "it lifts what the stream keeps of offline accuracy from 57 % to 88 %" in draw_conclusion(document).sentence


def test_conclusion_with_a_missed_target_ships_the_others(proven):
    proven["offline"][0] |= {"met": False, "ratio": 0.9}
    found = draw_conclusion(proven)
    assert "Ship it for two of three: bridge-cars falls short." in found.sentence
    assert found.tone is Tone.MIXED and "bridge-cars" not in found.ship
    assert found.worse[0].text == "misses its target: 90.0 % of its original, 95 % wanted"


def test_conclusion_with_a_query_starved_at_the_headline_memory_holds_it_back(proven):
    set_streaming(proven, "gate-people", "min", 0.27, 0.08)
    assert draw_conclusion(proven).sentence.endswith("Ship it for two of three: gate-people falls short.")
    assert conclusion_text(Report.model_validate(proven)).splitlines()[1] == (
        "  WORSE: gate-people, starved on the stream: 0.27 -> 0.08 with 38.1 MiB (min)"
    )


def test_conclusion_with_a_query_starved_at_another_memory_only_names_it(proven):
    proven["headline"] = {"memory": "50%", "memory_bytes": 60_000_000}
    set_streaming(proven, "gate-people", "min", 0.27, 0.08)
    found = draw_conclusion(proven)
    assert found.tone is Tone.GOOD
    assert [(one.query, one.decides) for one in found.worse] == [("gate-people", False)]
    assert "starved on the stream: 0.27 -&gt; 0.08 with 38.1 MiB (min)" in render(proven)


def test_conclusion_ignores_differences_that_two_decimals_hide(proven):
    set_streaming(proven, "gate-people", "min", 0.60, 0.58)
    set_streaming(proven, "bridge-cars", "min", 0.600, 0.597)
    found = draw_conclusion(proven)
    assert found.tone is Tone.GOOD
    assert [(one.query, one.text) for one in found.worse] == [
        ("gate-people", "worse on the stream: 0.60 -> 0.58 with 38.1 MiB (min)")
    ]


def test_conclusion_with_a_weak_original_does_not_ship_its_query(proven):
    proven["offline"][1] |= {"worth": False, "met": False}
    found = draw_conclusion(proven)
    assert found.sentence.endswith("Ship it for two of three: the original of gate-people is too weak to judge by.")
    assert not found.worse


def test_conclusion_begins_with_the_queries_without_evidence(proven):
    blank = {
        "met": False,
        "state": "not proven",
        "evidence": "none",
        "reason": "all 24 frames of test have one answer (shut)",
    }
    proven["offline"][1] |= blank
    found = draw_conclusion(proven)
    assert found.sentence.endswith(
        "1 of 3 queries have no evidence: gate-people, all 24 frames of test have one answer (shut). "
        "Ship it for two of three: gate-people has no evidence."
    )
    assert found.tone is Tone.MIXED and "gate-people" not in found.ship and not found.worse
    proven["offline"][1] |= {"met": True, "state": "unchanged"}
    assert draw_conclusion(proven).sentence.endswith("Ship it: the other two queries meet their accuracy target.")
    for row in proven["offline"]:
        row |= blank
    found = draw_conclusion(proven)
    assert "3 of 3 queries have no evidence: " in found.sentence and found.tone is Tone.BAD
    proven["shared"] = []
    assert draw_conclusion(proven).sentence.endswith("shared: models without evidence keep their own weights.")


def test_conclusion_where_all_fall_short_is_bad(document):
    for row in document["offline"]:
        row |= {"met": False, "ratio": 0.5}
    found = draw_conclusion(document)
    assert found.sentence.endswith("Don't ship it: bridge-cars, gate-people and square-busy fall short.")
    assert (found.tone, found.ship) == (Tone.BAD, ())


@pytest.mark.parametrize(
    ("method", "ceiling", "reason"),
    [
        ("none", 0.6, "method none is a baseline that shares nothing"),
        ("top-down", 0.0, "no two of the models have a layer of the same shape"),
        ("top-down", 0.6, "no two models kept their accuracy targets with a layer in common"),
    ],
)
def test_conclusion_without_shared_weights_gives_the_reason(document, method, ceiling, reason):
    document |= {"method": method, "shared": []}
    document["bytes"]["ceiling_fraction"] = ceiling
    assert draw_conclusion(document).sentence == f"Nothing could be shared: {reason}."


def test_headline_is_of_the_requested_memory(proven):
    headline = Report.model_validate(proven).judged_memory
    assert headline is not None and headline.memory == "min"
    assert "0.46 → 0.71" in render(proven)
    proven["headline"] = {"memory": "50%", "memory_bytes": 60_000_000}
    page = render(proven)
    assert "50% of the way from 38.1 MiB, the largest original alone, to 66.8 MiB, all originals at once" in page
    assert "(114.4 MiB of weights, 8.6 MiB of largest workspace)" in page
    assert "0.56 → 0.71" in page


def test_first_screen_with_markup_in_names_escapes_it(document):
    document["offline"][0]["met"] = False
    hostile = json.loads(json.dumps(document).replace("bridge-cars", "<img src=x>"))
    first = render(hostile).split("</header>")[0]
    assert "<img" not in first and "&lt;img src=x&gt;" in first


def test_conclusion_without_proofs_names_what_each_query_needs(document):
    document |= {"method": "top-down", "shared": []}
    document["offline"] = [row | {"state": "unchanged", "needs": "30 minutes"} for row in document["offline"]]
    told = draw_conclusion(document).sentence
    assert told.startswith("Nothing could be shared: nothing here could prove it: bridge-cars needs 30 minutes; ")
