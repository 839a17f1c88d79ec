"""Merges below their target that earlier ways to accept were wrong about: how often the present proof accepts them.

Usage: python -m benchmarks.merging.counterexamples [--rounds 20000] [--seed 0] [--part NAME] [--json FILE]

The cells are those in which a review found more than one false acceptance in forty, drawn apart from the grid of
benchmarks.merging.acceptance. The true ratio is the target, 0.95, or less. `frames`: val by frames, of models that
only lose. `clips`: val in clips, some of which hold all losses. `lumps`: val in clips of 20 frames, the differences of
a clip a beta draw, all lost or all gained; `footage`: footage in such clips. `looks`: several models are tried on the
same val, one after the other.

A cell above 0.03 by more than two standard errors makes the command exit with 1.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.merging.acceptance import MAX_FALSE, RIGHT, TARGET, find_worst, is_near, rate_error, take, write_record
from gemel.merger.proof import (
    PROOF,
    BlockCounts,
    LabelledValues,
    Observed,
    OriginalCounts,
    ProofSource,
    error_of_look,
    holds_by,
)

COMMAND = "python -m benchmarks.merging.counterexamples"
CLIP_FRAMES = 20
ROUNDS_AT_ONCE = 1000
RARE = 0.0
"""In place of a correlation: a tenth of the clips holds all differences."""
NET = (1 - TARGET) * RIGHT
"""The part of all frames that is lost and not gained elsewhere."""

Random = np.random.Generator
Draw = Callable[[Random, int], np.ndarray]
"""Whether each of so many merges is accepted."""


@dataclass(frozen=True, eq=False)
class Units:
    """Kinds of frames, or clips (..., U): frames that are right `before` and `after`, and all, by class (..., U, C).

    Each is there `counts` (..., U) times.
    """

    before: np.ndarray
    after: np.ndarray
    shown: np.ndarray
    counts: np.ndarray

    def measure_labels(self) -> LabelledValues:
        """Pseudo-values of balanced accuracy, as merger/observe.py has them."""
        nothing = np.zeros_like(self.after)
        before, after = (self._values(side, side) for side in (self.before, self.after))
        return LabelledValues(before, after, self._values(self.after, nothing), self.counts)

    def _values(self, right: np.ndarray, instead: np.ndarray) -> np.ndarray:
        """The values of units with what is right in them, or `instead` of that (..., U, C)."""
        count = self.counts.sum(-1, keepdims=True)
        hits, shown = ((self.counts[..., None] * side).sum(-2, keepdims=True) for side in (right, self.shown))
        whole = _mean_recall(hits - right + instead, np.broadcast_to(shown, (hits - right).shape))
        return count * whole - (count - 1) * _mean_recall(hits - right, shown - self.shown)


def _mean_recall(right: np.ndarray, shown: np.ndarray) -> np.ndarray:
    """Balanced accuracy over the classes (..., C) that are shown."""
    return (right / np.maximum(1, shown)).sum(-1) / np.maximum(1, (shown > 0).sum(-1))


def accept_labelled(units: Units, error: float = PROOF.error) -> np.ndarray:
    """Whether labels prove each merge."""
    return holds_by(Observed(TARGET, labels=units.measure_labels()), ProofSource.LABELS, error)


def draw_frames(random: Random, rounds: int, frames: int, classes: int, right: float) -> np.ndarray:
    """Val of equally many frames a class; the merged model loses a part of what is right."""
    each = round(frames / classes)
    correct = random.binomial(each, right, (rounds, classes))
    kept = correct - random.binomial(correct, 1 - TARGET)
    kind = np.kron(np.eye(classes), np.ones((3, 1)))
    before, after = (kind * np.tile(row, classes)[:, None] for row in ([1, 1, 0], [1, 0, 0]))
    counts = np.stack([kept, correct - kept, each - correct], -1).reshape(rounds, -1)
    return accept_labelled(Units(before, after, kind, counts))


def draw_clips(random: Random, rounds: int, frames: int, clips: int, holding: float) -> np.ndarray:
    """Val of two classes in clips, of which a part holds all losses."""
    shown = np.full((clips, 2), frames / clips / 2)
    before = random.binomial(shown.astype(int), RIGHT, (rounds, clips, 2))
    is_bad = random.random((rounds, clips, 1)) < holding
    after = before - random.binomial(before, np.where(is_bad, (1 - TARGET) / holding, 0.0))
    return accept_labelled(Units(before, after, shown, np.ones((rounds, clips))))


def draw_lumps(
    random: Random, rounds: int, clips: int, differ: float, correlation: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Frames of each clip (rounds, clips) that are right before, lost, and gained."""
    shape, losing = (rounds, clips), (1 + NET / differ) / 2
    size = 1 / correlation - 1 if correlation else 1.0
    shares = random.beta(differ * size, (1 - differ) * size, shape)
    if correlation == RARE:
        shares = np.where(random.random(shape) < 0.1, differ / 0.1, 0.0)
    loses = random.random(shape) < losing
    right = random.binomial(CLIP_FRAMES, RIGHT, shape)
    lost = random.binomial(right, np.where(loses, np.minimum(1, shares / RIGHT), 0.0))
    gained = random.binomial(CLIP_FRAMES - right, np.where(loses, 0.0, np.minimum(1, shares / (1 - RIGHT))))
    return right, lost, gained


def draw_labelled_lumps(random: Random, rounds: int, clips: int, differ: float, correlation: float) -> np.ndarray:
    """Val in such clips."""
    right, lost, gained = draw_lumps(random, rounds, clips, differ, correlation)
    shown = np.full((clips, 1), float(CLIP_FRAMES))
    after = right - lost + gained
    return accept_labelled(Units(right[..., None], after[..., None], shown, np.ones((rounds, clips))))


def draw_footage_lumps(
    random: Random, rounds: int, clips: int, blocks: int, differ: float, correlation: float
) -> np.ndarray:
    """Val in such clips says how often the original is right; footage in such clips proves."""
    right, _, _ = draw_lumps(random, rounds, clips, differ, correlation)
    _, lost, gained = draw_lumps(random, rounds, blocks, differ, correlation)
    answered = np.full((rounds, clips, 1), CLIP_FRAMES)
    original = OriginalCounts(answered, answered - right[..., None], right.mean(-1, keepdims=True) / CLIP_FRAMES)
    shown = np.full((rounds, blocks, 1), CLIP_FRAMES)
    footage = BlockCounts(shown, (lost + gained)[..., None])
    accepted, chosen = np.zeros(rounds, bool), np.flatnonzero(is_near(footage, None))
    observed = Observed(TARGET, take(footage, chosen), take(original, chosen))
    accepted[chosen] = holds_by(observed, ProofSource.AGREEMENT, PROOF.error)
    return accepted


def draw_looks(random: Random, rounds: int, frames: int, differ: float, looks: int) -> np.ndarray:
    """So many models, each below its target, are tried on val; whether any of them is proven."""
    lost = (differ + NET) / 2
    gained = max(0.0, differ - lost)
    cells = [RIGHT - lost, lost, gained, 1 - RIGHT - gained]
    before, after = (np.array(row, float)[:, None] for row in ([1, 1, 0, 0], [1, 0, 1, 0]))
    found = np.zeros(rounds, bool)
    for look in range(looks):
        counts = random.multinomial(frames, cells, rounds)
        found |= accept_labelled(Units(before, after, np.ones((4, 1)), counts), error_of_look(look))
    return found


def cells(part: str) -> Iterator[tuple[dict[str, float], Draw]]:
    """The cells of a part: what they are, and how they are drawn."""
    correlations, differences = (0.01, 0.1, 0.3, RARE), (0.045, 0.07)
    if part == "frames":
        counts = [(frames, 2) for frames in (64, 70, 76, 84, 100, 120, 160, 240, 400, 1000)]
        for (frames, classes), right in itertools.product([*counts, (200, 10), (400, 34), (800, 34)], (0.9, 1.0)):
            cell = {"frames": frames, "classes": classes, "right": right}
            yield cell, partial(draw_frames, **cell)  # type: ignore[arg-type]
    if part == "clips":
        sizes = ((300, 3), (300, 5), (600, 5), (1000, 10), (1000, 20), (2000, 40))
        for (frames, clips), holding in itertools.product(sizes, (0.1, 0.2, 0.4)):
            cell = {"frames": frames, "clips": clips, "holding": holding}
            yield cell, partial(draw_clips, **cell)  # type: ignore[arg-type]
    if part == "lumps":
        for clips, correlation, differ in itertools.product((4, 5, 8, 10, 20, 30, 50), correlations, differences):
            cell = {"clips": clips, "differ": differ, "correlation": correlation}
            yield cell, partial(draw_labelled_lumps, **cell)  # type: ignore[arg-type]
    if part == "footage":
        grid = itertools.product((5, 10, 20, 50), (50, 100, 250), correlations, differences)
        for clips, blocks, correlation, differ in grid:
            cell = {"clips": clips, "blocks": blocks, "differ": differ, "correlation": correlation}
            yield cell, partial(draw_footage_lumps, **cell)  # type: ignore[arg-type]
    if part == "looks":
        for frames, differ, looks in itertools.product((100, 270, 670), (0.045, 0.06), (1, 4, 8, 16)):
            cell = {"frames": frames, "differ": differ, "looks": looks}
            yield cell, partial(draw_looks, **cell)  # type: ignore[arg-type]


PARTS = ("frames", "clips", "lumps", "footage", "looks")


def false_rate(draw: Draw, rounds: int, seed: int) -> float:
    """The part of so many merges that is accepted."""
    random, accepted = np.random.default_rng(seed), 0
    for start in range(0, rounds, ROUNDS_AT_ONCE):
        accepted += int(draw(random, min(ROUNDS_AT_ONCE, rounds - start)).sum())
    return accepted / rounds


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", choices=PARTS, action="append")
    parser.add_argument("--json", type=Path, help="write the worst cell of each part here")
    given = parser.parse_args(arguments)
    rows = []
    for part in given.part or PARTS:
        found = list[dict[str, Any]]()
        for number, (cell, draw) in enumerate(cells(part)):
            rate = false_rate(draw, given.rounds, given.seed + 1000 * PARTS.index(part) + number)
            row = {"part": part, **cell, "rounds": given.rounds, "seed": given.seed}
            found.append({**row, "false": rate, "error": rate_error(rate, given.rounds)})
        rows.append(find_worst(found))
        print(rows[-1], flush=True)
    if given.json is not None:
        write_record(given.json, COMMAND, rows)
    return int(any(row["false"] - 2 * row["error"] > MAX_FALSE for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
