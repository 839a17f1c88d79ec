"""The report's first words: what to do, and whom merging made worse."""

from gemel.evaluation_text import conclusion_text
from gemel.report.conclusion import draw_conclusion
from gemel.report.page import render_report


def streaming(document, query, memory, originals, merged):
    for row in document["streaming"]:
        if (row["query"], row["memory"]) == (query, memory):
            row["accuracy"] = {"originals": originals, "merged": merged}[row["arm"]]


def test_a_bundle_that_keeps_every_target_is_shipped(document):
    found = draw_conclusion(document)
    assert found.sentence == (
        "Ship it: all three queries keep their accuracy target, with 65 % less memory for weights; the stream is "
        "answered at 0.71 instead of 0.46 in 38.1 MiB."
    )
    assert (found.tone, found.worse) == ("good", ())


def test_a_missed_target_keeps_its_query_from_being_shipped(document):
    document["offline"][0] |= {"met": False, "ratio": 0.9}
    found = draw_conclusion(document)
    assert found.sentence.startswith("Ship it for two of three: bridge-cars falls short; 65 % less")
    assert found.tone == "mixed" and "bridge-cars" not in found.ship
    assert found.worse[0].text == "misses its target: 90.0 % of its original, 95 % wanted"


def test_a_query_starved_in_the_memory_asked_for_is_not_shipped(document):
    streaming(document, "gate-people", "min", 0.27, 0.08)
    assert draw_conclusion(document).sentence.startswith("Ship it for two of three: gate-people falls short")
    assert conclusion_text(document).splitlines()[1] == (
        "  WORSE: gate-people, starved on the stream: 0.27 became 0.08 with 38.1 MiB (min)"
    )


def test_a_query_starved_in_another_memory_is_named_all_the_same(document):
    document["asked"] = {"memory": "50%", "memory_bytes": 60_000_000}
    streaming(document, "gate-people", "min", 0.27, 0.08)
    found = draw_conclusion(document)
    assert found.tone == "good"
    assert [(one.query, one.decides) for one in found.worse] == [("gate-people", False)]
    assert "starved on the stream: 0.27 became 0.08 with 38.1 MiB (min)" in render_report(document)


def test_a_fall_within_the_target_is_named_and_shipped_and_one_that_nobody_sees_is_neither(document):
    streaming(document, "gate-people", "min", 0.60, 0.58)
    streaming(document, "bridge-cars", "min", 0.600, 0.597)
    found = draw_conclusion(document)
    assert found.tone == "good"
    assert [(one.query, one.text) for one in found.worse] == [
        ("gate-people", "worse on the stream: 0.60 became 0.58 with 38.1 MiB (min)")
    ]


def test_an_original_that_is_no_evidence_is_not_shipped_on_its_word(document):
    document["offline"][1] |= {"worth": False, "met": False}
    found = draw_conclusion(document)
    assert found.sentence.startswith("Ship it for two of three: the original of gate-people is too weak to judge by;")
    assert not found.worse, "what proves nothing is not a target missed"


def test_nothing_is_shipped_where_all_fall_short(document):
    for row in document["offline"]:
        row |= {"met": False, "ratio": 0.5}
    found = draw_conclusion(document)
    assert found.sentence == "Don't ship it: bridge-cars, gate-people and square-busy fall short."
    assert (found.tone, found.ship) == ("bad", ())
