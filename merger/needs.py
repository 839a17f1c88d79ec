"""What a proof lacks, in minutes of footage, answers or labels; how likely what there is would prove a good merge."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from gemel.merger.proof import (
    PROOF,
    BlockCounts,
    JudgedDifferences,
    LabelledValues,
    Observed,
    blocks_needed,
    choose_sources,
    holds_by,
    is_clean,
    same_as_original,
    tail_by_labels,
)
from gemel.models.measures.bounds import bisect_largest

ANSWERS = (20, 30, 50)
"""Numbers of answers to ask for."""
MAX_MINUTES = 14 * 24 * 60
"""Most minutes of footage that are worth asking for: two weeks."""
MAX_FACTOR = 16
"""Most times that footage may have to be repeated to be worth asking for."""
MAX_DISAGREEMENT = 0.2
"""Largest part of all answers that may differ."""


@dataclass(frozen=True)
class GoodMerge:
    """A merge that should be accepted: its true ratio is 1."""

    disagreement: float = 0.02
    """Part of the answers that differs, half of them to the better."""
    correlation: float = 0.1
    """Of differences within a block."""
    rounds: int = 200


GOOD = GoodMerge()


@dataclass(frozen=True)
class Needs:
    """What one query lacks; any one of these suffices. None: that alone would not do."""

    minutes: int | None = None
    answers: int | None = None
    labels: int | None = None

    def text(self) -> str:
        """As a list of alternatives."""
        minutes = None if self.minutes is None else f"{self.minutes} minutes more of footage"
        answers = None if self.answers is None else f"{self.answers} answers (`gemel review`)"
        labels = None if self.labels is None else f"{self.labels} labelled val frames"
        return " or ".join(part for part in (minutes, answers, labels) if part) or "a model nearer to its original"


def find_needs(observed: Observed, error: float, block_s: float) -> Needs:
    """What would prove this query, if what is to come is as what there is."""
    return Needs(_find_minutes(observed, error, block_s), _find_answers(observed, error), _find_labels(observed, error))


def _find_minutes(observed: Observed, error: float, block_s: float) -> int | None:
    """Minutes of footage more, where differences stay as frequent as they are."""
    blocks, original = observed.blocks, observed.original
    if original is None or observed.target >= 1 or not original.recall.any():
        return None  # an original that is never right has no accuracy to keep, however long the footage
    if blocks is None or bool(is_clean(blocks).all()):
        count = 0 if blocks is None else blocks.count
        weight = original.recall / max(1e-9, float(original.recall.sum()))
        precision = 1 / float((weight / np.maximum(1e-9, original.precision_ends(0.5))).sum())
        more = float(blocks_needed(observed.target, precision, PROOF.unseen * error)) - count
        minutes = max(1, math.ceil(more * block_s / 60))
        return minutes if minutes <= MAX_MINUTES else None
    for factor in range(2, MAX_FACTOR + 1):
        longer = replace(observed, blocks=repeat_blocks(blocks, factor), judged=None)
        if is_shown(longer, error):
            return math.ceil((factor - 1) * blocks.count * block_s / 60)
    return None


def repeat_blocks(blocks: BlockCounts, factor: int) -> BlockCounts:
    """Footage so many times as long."""
    added = None if blocks.added is None else np.tile(blocks.added, (factor, 1))
    return BlockCounts(np.tile(blocks.shown, (factor, 1)), np.tile(blocks.differ, (factor, 1)), added)


def _find_answers(observed: Observed, error: float) -> int | None:
    """Answers, if as many of them are for the merged model as for its original."""
    if observed.blocks is None or observed.original is None or bool(is_clean(observed.blocks).all()):
        return None
    different = int(np.count_nonzero(observed.blocks.differ.sum(-1)))
    for count in ANSWERS:
        losses = np.repeat([1.0, 0.0], [count // 2, count - count // 2])
        judged = JudgedDifferences(losses, np.ones(count))
        if count <= different and is_shown(replace(observed, judged=judged), error):
            return count
    return None


def _find_labels(observed: Observed, error: float) -> int | None:
    """Labelled frames in all, for a model whose true ratio is 1."""
    labels = observed.labels
    if labels is None:
        return None
    right = float(labels.original.mean())
    differ = GOOD.disagreement if observed.blocks is None else float(observed.blocks.disagreement)
    part = min(differ / 2, right, 1 - right) if right < 1 else 0.0
    count = 50
    while count <= MAX_FACTOR * 200:
        cells = np.array([right - part, part, part, 1 - right - part]) * count
        values = LabelledValues(np.array([1.0, 1, 0, 0]), np.array([1.0, 0, 1, 0]), np.zeros(4), cells)
        if float(tail_by_labels(values, observed.target)) <= error:
            return count
        count = math.ceil(count * 1.2 / 10) * 10
    return None


def is_shown(observed: Observed, error: float) -> bool:
    """Whether any source shows that the target is reached."""
    return any(bool(holds_by(observed, source, error)) for source in choose_sources(observed, error))


def can_tell(observed: Observed, error: float) -> bool:
    """Whether what there is could prove a model that answers as its original does."""
    return is_shown(same_as_original(observed), error)


def find_power(observed: Observed, error: float) -> float:
    """How often a good merge would be proven, by simulation of its differences; 0 where nothing could prove it."""
    random = np.random.default_rng(0)
    observed = replace(observed, judged=None)
    sources = choose_sources(observed, error)
    if observed.labels is not None:
        observed = replace(observed, labels=draw_labels(observed.labels, random))
    if observed.blocks is not None:
        observed = replace(observed, blocks=draw_blocks(observed.blocks, random))
    return max((float(holds_by(observed, source, error).mean()) for source in sources), default=0.0)


def draw_labels(labels: LabelledValues, random: np.random.Generator) -> LabelledValues:
    """Val with the differences of good merges: some of what is right is lost, as much is gained elsewhere."""
    shape = (GOOD.rounds, len(labels.original))
    low, high = float(labels.lost.min()), float(labels.original.max())
    draws = random.random(shape)
    lost = draws < GOOD.disagreement / 2
    gained = draws > 1 - GOOD.disagreement / 2
    original = np.broadcast_to(labels.original, shape)
    merged = np.where(lost, low, np.where(gained, high, original))
    return LabelledValues(original, merged, np.full(shape, low), labels.counts)


def draw_blocks(blocks: BlockCounts, random: np.random.Generator) -> BlockCounts:
    """The footage with the differences of good merges."""
    size = 1 / GOOD.correlation - 1
    mean = GOOD.disagreement
    shares = random.beta(mean * size, (1 - mean) * size, (GOOD.rounds, blocks.count, 1))
    shown = np.broadcast_to(blocks.shown, (GOOD.rounds, *blocks.shown.shape))
    differ = random.binomial(np.round(shown).astype(int), shares)
    return BlockCounts(shown, differ, None if blocks.added is None else np.zeros_like(differ))


def find_allowed(observed: Observed, error: float) -> float:
    """The part of all answers that may differ, spread over all frames, so that a model is still proven."""
    observed = replace(observed, judged=None)
    sources = choose_sources(observed, error)

    def holds_with(part: float) -> bool:
        labels = None if observed.labels is None else spread_flips(observed.labels, part)
        blocks = None if observed.blocks is None else spread_differences(observed.blocks, part)
        different = replace(observed, labels=labels, blocks=blocks)
        return any(bool(holds_by(different, source, error)) for source in sources)

    return bisect_largest(holds_with, 0.0, MAX_DISAGREEMENT)


def spread_differences(blocks: BlockCounts, part: float) -> BlockCounts:
    """Footage on which so many answers differ, as far from each other as they can be."""
    total = float(blocks.shown.sum())
    count = math.ceil(part * total - 1e-9)
    places = (np.arange(count) + 0.5) * total / max(1, count)
    differ = np.zeros(blocks.shown.size)
    np.add.at(differ, np.searchsorted(blocks.shown.ravel().cumsum(), places, side="right"), 1)
    differ = differ.reshape(blocks.shown.shape)
    return replace(blocks, differ=differ, added=None if blocks.added is None else differ)


def spread_flips(labels: LabelledValues, part: float) -> LabelledValues:
    """Val on which so many answers differ: as many right ones are lost as wrong ones are gained, if there are any."""
    count = math.ceil(part * len(labels.original) - 1e-9)
    merged, high = labels.original.copy(), float(labels.original.max())
    order = np.argsort(labels.original, kind="stable")
    gained = min(count // 2, int((labels.original < high).sum()))
    merged[order[:gained]] = high
    lost = order[len(order) - (count - gained) :]
    merged[lost] = labels.lost[lost]
    return replace(labels, merged=merged)


def describe_power(power: float) -> str:
    """A likelihood as a person says it."""
    if power < 0.005:
        return "never"
    if power <= 0.5:
        return f"in 1 of {round(1 / power)} cases"
    return f"in {round(20 * power)} of 20 cases"
