"""How often a merge accepts a model of a known true ratio: the grid behind the promise, and the table of its power.

Usage: python -m benchmarks.merging.acceptance [--rounds 20000] [--seed 0] [--power] [--json FILE]
       [--part labels|agreement|between|mix|answers]

Each cell draws thousands of merges whose true ratio IS the target, so that every acceptance is wrong, and asks
merger/proof.py, as a merge does. `queries`: that many such queries share the error. The original is right in 0.9 of the
frames (detections: 0.85). Its answers are to be lost in 5 % of what is right, and where there are gains in 1.5 % of all
frames more, which are gained elsewhere. Correlation is that of losses within a clip or a block, a beta draw each; in
"a tenth" a tenth of the clips or blocks holds all losses. `between`: runs of 5 to 10 minutes have a share of losses of
their own; `spread`: only every so many blocks are there, so that an hour of footage is from a day. `mix`: the footage
shows the classes in another proportion than val, in runs.

A cell above 0.03 by more than two standard errors makes the command exit with 1.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from benchmarks.machine import machine
from gemel.merger.proof import (
    PROOF,
    BlockCounts,
    JudgedDifferences,
    LabelledValues,
    Observed,
    OriginalCounts,
    ProofSource,
    holds_by,
    tail_by_source,
)

T = TypeVar("T", BlockCounts, OriginalCounts, JudgedDifferences, LabelledValues)
COMMAND = "python -m benchmarks.merging.acceptance"
TARGET, RIGHT, HIT, GAINS = 0.95, 0.9, 0.85, 0.015
BLOCK_FRAMES, BLOCK_OBJECTS, FRAME_OBJECTS = 20, 20, 3
RUN_BLOCKS = (15, 30)
"""A run of 5 to 10 minutes, in blocks of 20 s."""
TENTH = -1.0
"""In place of a correlation: a tenth of the units holds all losses."""
MAX_FALSE = 0.03
MAX_ROUNDS_AT_ONCE = 2000
MIN_DEVIATIONS = 1.3
"""No test at an error of 2.5 % or less accepts a mean nearer to its limit than this."""


@dataclass(frozen=True)
class Cell:
    """One kind of merge: `source` is what proves, the rest says how val and footage are drawn."""

    source: str
    metric: str = "accuracy"
    frames: int = 200
    clips: int = 0
    blocks: int = 0
    correlation: float = 0.0
    gains: bool = False
    queries: int = 1
    between: float = 0.0
    spread: int = 1
    mix: bool = False
    answers: int = 0
    ratio: float = TARGET
    disagreement: float | None = None

    @property
    def classes(self) -> tuple[float, ...]:
        """The part of each class on val."""
        return (0.8, 0.2) if self.metric == "unbalanced" or self.mix else (1.0,)

    @property
    def footage_classes(self) -> tuple[float, ...]:
        """The part of each class on the footage."""
        return self.classes[::-1] if self.mix else self.classes

    @property
    def lost(self) -> float:
        """The part of all frames that is lost."""
        net = (1 - self.ratio) * RIGHT
        if self.disagreement is None:
            return net + GAINS * self.gains
        return max(net, (self.disagreement + net) / 2)

    @property
    def gained(self) -> float:
        """The part of all frames that is gained."""
        return self.lost - (1 - self.ratio) * RIGHT


def draw_shares(random: np.random.Generator, mean: float, correlation: float, shape: tuple[int, ...]) -> np.ndarray:
    """The share of losses of each unit: beta draws of this mean, or all of it in a tenth of them."""
    if correlation == TENTH:
        return np.where(random.random(shape) < 0.1, min(1.0, 10 * mean), 0.0)
    if correlation == 0 or mean == 0:
        return np.full(shape, mean)
    size = 1 / correlation - 1
    return random.beta(mean * size, (1 - mean) * size, shape)


def draw_runs(random: np.random.Generator, cell: Cell, mean: float, rounds: int) -> np.ndarray:
    """The share of losses of each block, in runs that are alike, and within these by block."""
    last = cell.blocks * cell.spread
    ends = random.integers(*RUN_BLOCKS, size=(rounds, last // RUN_BLOCKS[0] + 1), endpoint=True).cumsum(1)
    runs, times = np.zeros(ends.shape), np.arange(0, last, cell.spread)
    place = np.stack([np.searchsorted(own, times, side="right") for own in ends])
    shares = np.take_along_axis(draw_shares(random, mean, cell.between, runs.shape), place, 1)
    if cell.correlation <= 0:
        return shares
    size = 1 / cell.correlation - 1
    return random.beta(np.maximum(shares * size, 1e-9), np.maximum((1 - shares) * size, 1e-9))


def draw_original(random: np.random.Generator, cell: Cell, rounds: int) -> OriginalCounts:
    """How often the original is right on val."""
    clips = max(1, cell.clips)
    right = HIT if cell.metric == "f1" else RIGHT
    correlation = 0.1 if cell.correlation == TENTH else cell.correlation
    shares = draw_shares(random, right, correlation if cell.clips else 0.0, (rounds, clips))
    frames = cell.frames * (FRAME_OBJECTS if cell.metric == "f1" else 1)
    counts = np.array([max(1, round(frames * part / clips)) for part in cell.classes])
    answered = np.broadcast_to(counts, (rounds, clips, len(counts)))
    wrong = random.binomial(answered, 1 - shares[..., None])
    return OriginalCounts(answered, wrong, np.full((rounds, len(counts)), right), np.ones(rounds))


def draw_footage(random: np.random.Generator, cell: Cell, rounds: int) -> BlockCounts:
    """What differs on the footage."""
    shape, parts = (rounds, cell.blocks), cell.footage_classes
    if cell.metric == "f1":
        moved = cell.gains  # a box that moved is lost and added
        lost = 0.05 * HIT if moved else 0.0713
        shown = random.poisson(BLOCK_OBJECTS, shape)[..., None]
        differ = random.binomial(shown, draw_shares(random, lost, cell.correlation, shape)[..., None])
        return BlockCounts(shown, differ, differ if moved else np.zeros_like(differ))
    mean = cell.lost + cell.gained
    shares = (
        draw_runs(random, cell, mean, rounds) if cell.between else draw_shares(random, mean, cell.correlation, shape)
    )
    shown = random.multinomial(BLOCK_FRAMES, parts, shape)
    return BlockCounts(shown, random.binomial(shown, np.minimum(1, shares)[..., None]))


def draw_labels(random: np.random.Generator, cell: Cell, rounds: int) -> LabelledValues:
    """Merged against original on labelled val."""
    if cell.metric == "f1":
        return draw_detections(random, cell, rounds)
    lost, gained = cell.lost / RIGHT, cell.gained / (1 - RIGHT)
    if not cell.clips:
        both = np.array([RIGHT * (1 - lost), RIGHT * lost, (1 - RIGHT) * gained, (1 - RIGHT) * (1 - gained)])
        counts = [random.multinomial(round(cell.frames * part), both, rounds) for part in cell.classes]
        sizes = [cell.frames / (len(counts) * round(cell.frames * part)) for part in cell.classes]
        before = np.concatenate([np.array([size, size, 0, 0]) for size in sizes])
        after = np.concatenate([np.array([size, 0, size, 0]) for size in sizes])
        shape = (rounds, len(before))
        before, after = (np.broadcast_to(side, shape) for side in (before, after))
        return LabelledValues(before, after, np.zeros(shape), np.concatenate(counts, 1))
    correlation = 0.1 if cell.correlation == TENTH else cell.correlation
    right = draw_shares(random, RIGHT, correlation, (rounds, cell.clips))
    losing = draw_shares(random, lost, cell.correlation, (rounds, cell.clips))
    before, after = np.zeros((2, rounds, cell.clips))
    for part in cell.classes:
        count = max(1, round(cell.frames * part / cell.clips))
        correct = random.binomial(count, right)
        kept = correct - random.binomial(correct, np.minimum(1, losing)) + random.binomial(count - correct, gained)
        before, after = before + correct / (count * len(cell.classes)), after + kept / (count * len(cell.classes))
    return LabelledValues(before, after, np.zeros_like(before))


def draw_detections(random: np.random.Generator, cell: Cell, rounds: int) -> LabelledValues:
    """As `draw_labels` for F1, by frames: a hit that is lost leaves a false detection (a box that moved)."""
    shape = (rounds, cell.frames)
    objects = random.poisson(FRAME_OBJECTS, shape)
    hits, false = random.binomial(objects, HIT), random.poisson(FRAME_OBJECTS * (1 - HIT), shape)
    losing = 0.05 if cell.ratio == TARGET else 1 - cell.ratio
    merged = hits - random.binomial(hits, losing)
    values = [influence_of_f1(side, hits + false + objects) for side in (hits, merged, np.zeros_like(hits))]
    return LabelledValues(values[0], values[1], np.where(hits > 0, values[1].min(1, keepdims=True), values[1]))


def influence_of_f1(hits: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """F1 as a mean over frames: 2 hits / sizes, linear around its value."""
    mean = sizes.mean(1, keepdims=True)
    whole = 2 * hits.mean(1, keepdims=True) / mean
    return whole + (2 * hits - whole * sizes) / mean


def draw_answers(random: np.random.Generator, cell: Cell, blocks: BlockCounts, count: int) -> JudgedDifferences:
    """Answers to so many differences at even distances, at most one a block, whose differences are all alike."""
    differ = blocks.differ.sum(-1)
    places, rounds = differ.cumsum(1), np.arange(len(differ))
    step = np.maximum(places[:, -1:], 1) / count
    at = (random.random((len(differ), 1)) + np.arange(count)) * step
    block = np.minimum((places[:, None, :] <= at[..., None]).sum(2), blocks.count - 1)
    first = np.concatenate([np.ones((len(differ), 1), bool), np.diff(block, axis=1) > 0], 1)
    group = first.cumsum(1) - 1
    weights, losses = np.zeros((2, len(differ), count))
    np.add.at(weights, (rounds[:, None], group), 1.0)
    is_loss = random.random(differ.shape) < cell.lost / (cell.lost + cell.gained)
    np.put_along_axis(losses, group, np.take_along_axis(is_loss, block, 1).astype(float), 1)
    return JudgedDifferences(losses, weights)


def accepts(random: np.random.Generator, cell: Cell, errors: Sequence[float], rounds: int) -> np.ndarray:
    """Whether each of so many merges accepts a query (E, rounds) at each of these errors."""
    if cell.source == "labels":
        observed = Observed(TARGET, labels=draw_labels(random, cell, rounds))
        return np.stack([holds_by(observed, ProofSource.LABELS, error) for error in errors])
    labels = draw_labels(random, cell, rounds) if cell.source == "all" else None
    blocks, original = draw_footage(random, cell, rounds), draw_original(random, cell, rounds)
    judged = draw_answers(random, cell, blocks, cell.answers) if cell.answers else None
    sources = [ProofSource.AGREEMENT, ProofSource.ANSWERS]
    chosen = np.flatnonzero(is_near(blocks, judged))
    if labels is not None:  # as `choose_sources` has it where both could tell
        sources, chosen = [ProofSource.AGREEMENT_AND_LABELS, ProofSource.ANSWERS_AND_LABELS], np.arange(rounds)
        labels = take(labels, chosen)
    observed = Observed(TARGET, take(blocks, chosen), take(original, chosen), labels=labels)
    if judged is not None:
        observed = replace(observed, judged=take(judged, chosen))
    accepted = np.zeros((len(errors), rounds), bool)
    for source in sources[: 1 + bool(cell.answers)]:
        if cell.classes == (1.0,) and cell.metric == "accuracy":  # of 180 blocks the p-value is that of all errors
            tail = tail_by_source(observed, source, max(errors))
            accepted[:, chosen] |= tail <= np.array(errors)[:, None]
            continue
        for row, error in zip(accepted, errors, strict=True):
            row[chosen] |= holds_by(observed, source, error)
    return accepted


def take(counts: T, chosen: np.ndarray) -> T:
    """These rounds alone."""
    parts = {name: value[chosen] for name, value in vars(counts).items() if isinstance(value, np.ndarray)}
    return replace(counts, **parts)  # type: ignore[type-var]


def is_near(blocks: BlockCounts, judged: JudgedDifferences | None) -> np.ndarray:
    """The rounds that could be accepted at all, by their means; the others need no computation."""
    shares = blocks.differ.sum(-1) / np.maximum(1, blocks.shown.sum(-1))
    ends = shares.mean(1) + MIN_DEVIATIONS * shares.std(1) / math.sqrt(blocks.count)
    if judged is not None:
        net = 2 * (judged.losses * judged.weights).sum(1) / judged.weights.sum(1) - 1
        ends = shares.mean(1) * np.minimum(1, net)
    limit = 0.09 if blocks.added is not None or blocks.shown.shape[-1] > 1 else 1 - TARGET
    return ends < limit


def start_random(cell: Cell, seed: int) -> np.random.Generator:
    """A generator of its own for each cell. Seed 0 is the one on which the constants of the proof were chosen."""
    return np.random.default_rng([*repr(cell).encode(), *([seed] if seed else [])])


def false_rate(cell: Cell, rounds: int, seed: int = 0) -> tuple[float, float]:
    """The likelihood that a merge accepts any of its queries, all of them below target, and its standard error."""
    random, accepted = start_random(cell, seed), 0
    for start in range(0, rounds, MAX_ROUNDS_AT_ONCE):
        count = min(MAX_ROUNDS_AT_ONCE, rounds - start)
        accepted += int(accepts(random, cell, [PROOF.error / cell.queries], count).sum())
    rate = accepted / rounds
    deviation = rate_error(rate, rounds)
    return 1 - (1 - rate) ** cell.queries, cell.queries * deviation * (1 - rate) ** (cell.queries - 1)


def rate_error(rate: float, rounds: int) -> float:
    """The standard error of a rate; of none at all that of one in all rounds."""
    return math.sqrt(max(rate, 1 / rounds) * (1 - rate) / rounds)


def power(cell: Cell, rounds: int, seed: int = 0) -> float:
    """The part of good queries that a merge of so many accepts (Holm)."""
    random, rates = start_random(cell, seed), []
    steps = range(1, cell.queries + 1)
    for start in range(0, rounds, MAX_ROUNDS_AT_ONCE // cell.queries):
        count = min(MAX_ROUNDS_AT_ONCE // cell.queries, rounds - start)
        drawn = accepts(random, cell, [PROOF.error / step for step in steps], count * cell.queries)
        drawn = drawn.reshape(cell.queries, count, cell.queries)
        accepted = np.zeros(drawn.shape[1:], bool)
        for _ in steps:
            waiting = np.clip(cell.queries - accepted.sum(1), 1, None) - 1
            accepted |= drawn[waiting, np.arange(count)]
        rates.append(accepted.mean())
    return float(np.mean(rates))


def grid(part: str) -> Iterator[Cell]:
    """The cells of one part of the grid."""
    correlations, gains, queries = (0.0, 0.1, 0.3, TENTH), (False, True), (1, 4, 10)
    if part == "labels":
        for metric, frames, gain, count in itertools.product(
            ("accuracy", "unbalanced"), (40, 64, 100, 200, 400, 1000, 2000), gains, queries
        ):
            yield Cell("labels", metric, frames, gains=gain, queries=count)
        for frames, count in itertools.product((40, 100, 400), queries):
            yield Cell("labels", "f1", frames, queries=count)
        for metric, clips, correlation, gain, count in itertools.product(
            ("accuracy", "unbalanced"), (3, 5, 10, 20, 40), correlations, gains, queries
        ):
            yield Cell("labels", metric, 20 * clips, clips, correlation=correlation, gains=gain, queries=count)
    if part == "agreement":
        for (frames, clips), blocks, correlation, gain, count in itertools.product(
            ((200, 0), (2000, 0), (60, 3), (200, 10), (2000, 40)), (90, 180, 540), correlations, gains, queries
        ):
            yield Cell("agreement", "accuracy", frames, clips, blocks, correlation, gain, count)
        for metric, frames, blocks, correlation, gain, count in itertools.product(
            ("unbalanced", "f1"), (200, 2000), (90, 180), correlations, gains, (1, 4)
        ):
            yield Cell("agreement", metric, frames, 0, blocks, correlation, gain, count)
        for blocks, correlation, count in itertools.product((90, 180), correlations, (1, 4)):
            yield Cell("agreement", "unbalanced", 1000, 0, blocks, correlation, queries=count, mix=True)
    if part == "between":
        hours = ((180, 1), (180, 9), (540, 1), (1800, 1))  # an hour, one from a day, three hours, ten hours
        for (blocks, spread), run, correlation, count in itertools.product(hours, (0.03, 0.1), (0.0, 0.1), (1, 4)):
            yield Cell("agreement", "accuracy", 2000, 0, blocks, correlation, False, count, run, spread)
        for run, correlation in itertools.product((0.03, 0.1), (0.0, 0.1)):
            yield Cell("all", "accuracy", 200, 0, 180, correlation, False, 4, run)
    if part == "mix":
        for blocks, run, correlation in itertools.product((180, 540), (0.03, 0.1), (0.0, 0.1)):
            yield Cell("agreement", "unbalanced", 1000, 0, blocks, correlation, between=run, mix=True)
    if part == "answers":
        for answers, blocks, correlation, gain, count in itertools.product(
            (20, 50), (90, 180), correlations, gains, queries
        ):
            yield Cell("agreement", "accuracy", 200, 0, blocks, correlation, gain, count, answers=answers)
        for blocks, correlation, gain, count in itertools.product((180,), correlations, gains, (1, 4)):
            yield Cell("all", "accuracy", 200, 0, blocks, correlation, gain, count, answers=20)


def find_worst(cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The cell of a part that is accepted most often, and how many there are."""
    return {**max(cells, key=lambda row: row["false"]), "cells": len(cells)}


def write_record(path: Path, command: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a row a line, with command, machine and date; a row has no key for None and False."""
    lines = [json.dumps({key: one for key, one in row.items() if one is not None and one is not False}) for row in rows]
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    head = json.dumps({"command": command, "machine": machine(), "date": date})
    path.write_text(f'{head[:-1]}, "rows": [\n' + ",\n".join(lines) + "\n]}\n", encoding="utf-8")


PARTS = ("labels", "agreement", "between", "mix", "answers")
POWER = (
    ("val alone", Cell("labels")),
    ("an hour of footage", Cell("agreement", blocks=180)),
    ("val and an hour", Cell("all", blocks=180)),
    ("val, an hour, 20 answers", Cell("all", blocks=180, answers=20)),
    ("val, an hour, 50 answers", Cell("all", blocks=180, answers=50)),
)
GOOD = ((1.0, 0.01), (1.0, 0.03), (1.0, 0.06), (0.98, 0.03))
"""True ratio and part of the answers that differs."""
POWER_HEADS = [f"{ratio:g} at {differ:.0%}" for ratio, differ in GOOD]


def power_rows(rounds: int, seed: int) -> Iterator[dict[str, Any]]:
    """A row for each source, number of labels and correlation of the footage."""
    for count, frames, (name, cell), correlation in itertools.product((1, 4), (100, 200, 400), POWER, (0.0, 0.1)):
        if cell.source == "labels" and correlation:
            continue
        cell = replace(cell, queries=count, frames=frames, correlation=correlation)
        values = [power(replace(cell, ratio=ratio, disagreement=differ), rounds, seed) for ratio, differ in GOOD]
        row = {"queries": count, "labels": frames, "proof": name, "correlation": correlation}
        yield {**row, **dict(zip(POWER_HEADS, values, strict=True)), "rounds": rounds, "seed": seed}


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=0, help="other draws than those the constants were chosen on")
    parser.add_argument("--part", choices=PARTS, action="append")
    parser.add_argument("--power", action="store_true", help="how often good merges are accepted, instead")
    parser.add_argument("--json", type=Path, help="write the worst cell of each part here, or the table of power")
    given = parser.parse_args(arguments)
    rows = []
    for row in power_rows(given.rounds, given.seed) if given.power else ():
        rows.append(row)
        print(row, flush=True)
    for part in () if given.power else given.part or PARTS:
        cells = list[dict[str, Any]]()
        for cell in grid(part):
            rate, deviation = false_rate(cell, given.rounds, given.seed)
            row = {"part": part, **asdict(cell), "rounds": given.rounds, "seed": given.seed}
            cells.append({**row, "false": rate, "error": deviation})
        rows.append(find_worst(cells))
        print(rows[-1], flush=True)
    if given.json is not None:
        write_record(given.json, COMMAND, rows)
    return int(any(row["false"] - 2 * row["error"] > MAX_FALSE for row in rows if "false" in row))


if __name__ == "__main__":
    raise SystemExit(main())
