"""What a merge promises about chance: how seldom a model below its target is accepted, and how often a good one is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import beta

from benchmarks.merging.acceptance import TENTH, Cell, false_rate, power
from gemel.merger.needs import can_tell, describe_power, find_needs, find_power
from gemel.merger.proof import (
    PROOF,
    BlockCounts,
    JudgedDifferences,
    LabelledValues,
    Observed,
    OriginalCounts,
    ProofSource,
    blocks_needed,
    certain_original,
    choose_sources,
    error_of_look,
    holds_by,
    promised_classes,
    prove_chains,
    prove_queries,
    prove_query,
)
from gemel.models.measures.bounds import design_effect, tail_of_mean

FRAMES = 20
ROUNDS = 1500


def footage(blocks: int, differing: int = 0, a_block: int = 1) -> BlockCounts:
    """Blocks of one class; every few blocks one has so many answers that differ."""
    differ = np.zeros((blocks, 1))
    places = np.linspace(0, blocks - 1, differing).astype(int) if differing else []
    differ[places] = a_block
    return BlockCounts(np.full((blocks, 1), FRAMES), differ, seconds=20.0 * blocks)


def original(right: int = 180, frames: int = 200) -> OriginalCounts:
    """An original that is right in so many frames of val."""
    return OriginalCounts(np.array([[frames]]), np.array([[frames - right]]), np.array([right / frames]))


def labels(right: int, lost: int, gained: int, wrong: int) -> LabelledValues:
    """Val of so many frames on which both are right, one of them, or none."""
    counts = np.array([right, lost, gained, wrong])
    return LabelledValues(np.array([1.0, 1, 0, 0]), np.array([1.0, 0, 1, 0]), np.zeros(4), counts)


@pytest.mark.parametrize(
    ("frames", "events", "mean"), [(87, 0, 0.045), (180, 3, 0.045), (40, 2, 0.2), (1000, 30, 0.045)]
)
def test_tail_of_zeros_and_ones_is_clopper_and_pearson(frames: int, events: int, mean: float) -> None:
    values = np.repeat([1.0, 0.0], [events, frames - events]) - mean
    exact = beta.sf(mean, events + 1, frames - events)
    assert float(tail_of_mean(values, 1 - mean)) == pytest.approx(exact, rel=0.02)


@pytest.mark.parametrize(("queries", "blocks"), [(1, 87), (4, 118), (10, 139)])
def test_blocks_without_a_difference_prove_once_there_are_enough(queries: int, blocks: int) -> None:
    error = PROOF.error / queries
    assert round(float(blocks_needed(0.95, 0.9, PROOF.unseen * error))) == pytest.approx(blocks, abs=1)
    enough = Observed(0.95, footage(blocks + 1), original(1800, 2000))
    assert prove_query(enough, error).proven
    assert not prove_query(replace(enough, blocks=footage(blocks - 2)), error).proven


@pytest.mark.parametrize(
    "cell",
    [
        Cell("labels", frames=64),
        Cell("labels", frames=400, gains=True, queries=4),
        Cell("labels", "unbalanced", 200),
        Cell("labels", frames=100, clips=5, correlation=TENTH),
        Cell("labels", frames=400, clips=20, correlation=0.3),
        Cell("agreement", frames=200, blocks=90, correlation=0.3),
        Cell("agreement", frames=2000, blocks=90, correlation=TENTH),
        Cell("agreement", "unbalanced", 2000, blocks=90, correlation=0.1, mix=True),
        Cell("agreement", "f1", 200, blocks=90, correlation=0.1, gains=True),
        Cell("agreement", frames=2000, blocks=180, between=0.1, spread=9),
        Cell("agreement", frames=2000, blocks=540, correlation=0.1, between=0.03),
        Cell("all", frames=200, blocks=90, correlation=0.1, gains=True, answers=20),
    ],
    ids=repr,
)
def test_merge_below_its_target_is_seldom_accepted(cell: Cell) -> None:
    rate, deviation = false_rate(cell, ROUNDS)
    assert rate <= 0.03 + 2 * deviation


def test_good_merge_is_accepted_from_an_hour_and_a_few_answers() -> None:
    cell = Cell("all", frames=200, blocks=180, queries=4, ratio=1.0, disagreement=0.03)
    assert power(cell, 100) >= 0.9
    assert power(replace(cell, correlation=0.1, answers=20), 60) >= 0.9
    assert power(replace(cell, source="labels"), 100) < 0.85


def test_queries_share_the_error_and_a_proven_one_frees_its_share() -> None:
    clean, few = Observed(0.95, footage(180), original()), Observed(0.95, footage(100), original(1800, 2000))
    assert prove_query(few, PROOF.error).proven and not prove_query(few, PROOF.error / 2).proven
    alone = {"a": clean, "b": few}
    assert [proof.proven for proof in prove_queries(alone, dict.fromkeys(alone, PROOF.error)).values()] == [True, True]
    both = {"a": few, "b": few}
    assert not any(proof.proven for proof in prove_queries(both, dict.fromkeys(both, PROOF.error)).values())


def test_models_of_a_query_are_proven_in_their_order_and_the_last_one_frees_its_share() -> None:
    clean, few = Observed(0.95, footage(180), original()), Observed(0.95, footage(100), original(1800, 2000))

    def proven(chain: list[Observed]) -> list[bool]:
        chains = {"a": chain, "b": [few]}
        return [proof.proven for proof in prove_chains(chains, dict.fromkeys(chains, PROOF.error))["b"]]

    assert proven([clean, clean, clean]) == [True], "a query that is proven to its end passes its error on"
    assert proven([clean, few]) == [False], "one that is not keeps it, whatever was proven before"


def test_answers_prove_what_agreement_leaves_open() -> None:
    observed = Observed(0.95, footage(180, 90, 2), original())
    assert not prove_query(observed, PROOF.error).proven
    even = JudgedDifferences(np.repeat([1.0, 0.0], 10), np.ones(20))
    proof = prove_query(replace(observed, judged=even), PROOF.error)
    assert proof.proven and proof.source is ProofSource.ANSWERS and 0.95 <= proof.lower_end < 1
    all_lost = JudgedDifferences(np.ones(20), np.ones(20))
    assert not prove_query(replace(observed, judged=all_lost), PROOF.error).proven


def test_differences_in_runs_count_as_fewer_blocks() -> None:
    spread, run = np.zeros(180), np.zeros(180)
    spread[::18], run[:10] = 1, 1
    assert design_effect(spread) < 1.2 and design_effect(run) > 5


def test_no_lower_end_is_one() -> None:
    assert prove_query(Observed(0.95, footage(2000), certain_original(1)), PROOF.error).lower_end < 1
    assert prove_query(Observed(0.95, labels=labels(1000, 0, 0, 0)), PROOF.error).lower_end < 1


def test_sources_are_those_that_could_tell() -> None:
    small, large = labels(18, 0, 0, 2), labels(360, 0, 0, 40)
    both = Observed(0.95, footage(180), original(), labels=large)
    assert choose_sources(both, PROOF.error) == (ProofSource.AGREEMENT_AND_LABELS,)
    assert choose_sources(replace(both, labels=small), PROOF.error) == (ProofSource.AGREEMENT,)
    assert choose_sources(replace(both, blocks=footage(20)), PROOF.error) == (ProofSource.LABELS,)
    assert not can_tell(Observed(0.95, labels=small), PROOF.error)


def test_labels_and_footage_prove_together_what_neither_proves_alone() -> None:
    both = Observed(0.95, footage(180, 64, 2), original(), labels=labels(175, 5, 4, 16))
    error = PROOF.error / 4
    assert not any(holds_by(both, source, error) for source in (ProofSource.LABELS, ProofSource.AGREEMENT))
    assert prove_query(both, error).source is ProofSource.AGREEMENT_AND_LABELS and prove_query(both, error).proven


def test_class_that_footage_never_shows_is_not_promised() -> None:
    shown = np.repeat([[20.0, 0.0]], 180, axis=0)
    blocks = BlockCounts(shown, np.zeros_like(shown))
    both = OriginalCounts(np.array([[100, 100]]), np.array([[5, 5]]), np.array([0.95, 0.95]))
    assert promised_classes(blocks, both, 0.95, PROOF.error).tolist() == [True, False]
    assert not promised_classes(replace(blocks, shown=np.zeros_like(shown)), both, 0.95, PROOF.error).any()
    assert not prove_query(Observed(0.95, replace(blocks, shown=np.zeros_like(shown)), both), PROOF.error).proven


def test_original_that_is_never_right_proves_nothing() -> None:
    assert not prove_query(Observed(0.95, footage(2000), original(0)), PROOF.error).proven


def test_few_differences_are_counted_by_block() -> None:
    assert prove_query(Observed(0.95, footage(111, 4), original()), PROOF.error).proven


def test_differences_in_long_runs_prove_nothing() -> None:
    apart, together = footage(180, 40), footage(180)
    together.differ[70:90] = 2
    assert prove_query(Observed(0.95, apart, original()), PROOF.error).proven
    assert not prove_query(Observed(0.95, together, original()), PROOF.error).proven


def test_looks_at_the_same_footage_spend_little_more() -> None:
    errors = [error_of_look(earlier) for earlier in range(30)]
    assert errors[0] == 0.025 and errors == sorted(errors, reverse=True) and sum(errors) <= 0.03


def test_needs_name_minutes_answers_and_labels() -> None:
    clean = find_needs(Observed(0.95, footage(45), original()), PROOF.error, 20.0)
    assert clean.minutes is not None and 14 <= clean.minutes <= 20 and clean.answers is None
    different = Observed(0.95, footage(180, 90, 2), original(), labels=labels(90, 2, 2, 6))
    needs = find_needs(different, PROOF.error, 20.0)
    assert needs.answers == 20 and needs.labels is not None and 100 < needs.labels < 1000
    assert "20 answers (`gemel review`)" in needs.text()


def test_power_says_how_often_a_good_merge_would_be_proven() -> None:
    few = find_power(Observed(0.95, labels=labels(90, 0, 0, 10)), PROOF.error / 4)
    both = Observed(0.95, footage(180), original(), labels=labels(180, 0, 0, 20))
    many = find_power(both, PROOF.error / 4)
    assert few < 0.3 and many > 0.8
    assert (describe_power(0.04), describe_power(0.95)) == ("in 1 of 25 cases", "in 19 of 20 cases")
