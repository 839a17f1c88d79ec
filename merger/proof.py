"""What a merge promises about chance, and how it is shown from agreement, answers and labels.

The promise: "On footage like this, accuracy falls by at most U points, whatever the right answers are; if the original
is right there as often, and for each class as precise, as on val, the ratio is at least the target; one merge in forty
may be wrong about this."

Where two models answer alike, accuracy cannot differ. So most of a proof needs no label: footage is cut into blocks of
some seconds, and what the merged model answers otherwise than its original is counted by block, since answers near each
other in time are alike. Four sources, each a bound on merged / original:

    agreement   1 - U / p: U bounds the answers that differ, p is the precision of the original on val
    answers     1 - U n / p: n is what is lost, less what is gained, of the differences that a person has judged
    labels      merged against original on val, by frames, or by clips where there are some
    shift       of a detector: boxes that are found again and yet no longer fit their label, on val

Every bound is the upper end of a mean (`tail_of_mean`). Val and footage are apart, so their p-values combine.
Arrays may have leading axes: benchmarks/merging/acceptance.py simulates thousands of merges with these functions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache, reduce

import numpy as np
from scipy.special import betaincinv, ndtr, stdtr

from gemel.models.measures.bounds import bisect_largest, design_effect, tail_of_mean, upper_ends


@dataclass(frozen=True)
class ProofConfig:
    """The error of a proof, and how it is divided."""

    error: float = 0.025
    """Likelihood that a merge accepts any query whose true ratio is below its target: one merge in forty."""
    later_looks: float = 0.005
    """Error of all looks after the first at the same footage together: each has half of what is left."""
    shift: float = 0.2
    """Part of a query's error for boxes that moved, of a detector."""
    unseen: float = 0.8
    """Part of the error that may fall on differences of which no block shows any."""
    runs: float = 1.5
    """Times the standard error over joined blocks. Of few runs of minutes that differ alike, those that lose most are
    seldom seen, and their spread with them: of an hour of such runs 0.038 were accepted with 1.2, 0.029 with 1.5."""
    freedom: float = 0.5
    """Times the degrees of freedom of joined blocks, since a run lies in several: 0.05 were accepted with 1."""
    few: int = 4
    """Blocks with a difference that are counted by block alone: of so few, runs cannot be told from chance."""
    min_joined: int = 4
    """Joined blocks of one length at least."""


PROOF = ProofConfig()


def normal_nodes(count: int) -> list[tuple[float, float]]:
    """Points of the standard normal distribution and their weights: the mean of a smooth function (Gauss, Hermite)."""
    points, weights = np.polynomial.hermite_e.hermegauss(count)
    return list(zip(points.tolist(), (weights / weights.sum()).tolist(), strict=True))


NODES, COARSE_NODES = normal_nodes(7), normal_nodes(3)


class ProofSource(str, Enum):
    """What a proof is made from."""

    AGREEMENT = "agreement"
    ANSWERS = "answers"
    LABELS = "labels"
    AGREEMENT_AND_LABELS = "agreement and labels"
    ANSWERS_AND_LABELS = "answers and labels"


# What was observed ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class BlockCounts:
    """What two models answer on unlabelled footage, by block (..., B) in order of time and class of answer (..., B, C).

    `shown` are the original's answers (or objects), `differ` those that the merged model does not give, `added` its
    objects that are none of the original's. For other tasks `differ` is the sum of what lacks to full agreement.
    `seconds` are those of all blocks.
    """

    shown: np.ndarray
    differ: np.ndarray
    added: np.ndarray | None = None
    seconds: float = 0.0

    @property
    def count(self) -> int:
        """The number of blocks."""
        return self.shown.shape[-2]

    @property
    def disagreement(self) -> np.ndarray:
        """The part of all answers that differs."""
        return self.differ.sum((-2, -1)) / np.maximum(1, self.shown.sum((-2, -1)))


@dataclass(frozen=True, eq=False)
class OriginalCounts:
    """How often the original is right on val, by clip or, without clips, in a single row (..., U, C).

    `answered` are its answers (or detections) of each class, `wrong` those that are wrong; `recall` (..., C) is that of
    each class, `objects` the number of labelled objects for each detection. Without labels it is right by definition.
    """

    answered: np.ndarray
    wrong: np.ndarray
    recall: np.ndarray
    objects: np.ndarray | float = 1.0

    @property
    def precision(self) -> np.ndarray:
        """The precision of each class (..., C)."""
        return 1 - self.wrong.sum(-2) / np.maximum(1, self.answered.sum(-2))

    def precision_ends(self, error: float) -> np.ndarray:
        """The lower end of each class's precision (..., C) at this error: by frames, and not above that by clips."""
        answered, wrong = self.answered.sum(-2), self.wrong.sum(-2)
        right = answered - wrong
        ends = np.where(right > 0, betaincinv(np.maximum(right, 1e-9), wrong + 1, error), 0.0)
        clips = self.answered.shape[-2]
        if clips == 1:
            return ends
        mean = np.maximum(1e-9, answered / clips)
        parts, sizes = (np.moveaxis(side / mean[..., None, :], -2, -1) for side in (self.wrong, self.answered))
        heaviest = np.maximum(parts.max(-1), 1 / mean)  # or a single frame, where none was wrong
        return np.minimum(ends, 1 - upper_ends(parts, sizes, heaviest, error))


@dataclass(frozen=True, eq=False)
class LabelledValues:
    """A metric on labelled val as values (..., U) of its frames or clips, whose mean is the metric.

    `lost` is the value that the merged model would have if everything in that frame or clip were wrong. Equal ones may
    stand once, with `counts` (..., U).
    """

    original: np.ndarray
    merged: np.ndarray
    lost: np.ndarray
    counts: np.ndarray | float = 1.0


@dataclass(frozen=True, eq=False)
class JudgedDifferences:
    """What a person said of differences, at most one a block.

    `losses` (..., N) are 1 where the original alone was right, or the person could not tell, 0 where the merged model
    alone was, 1/2 where neither was; `weights` (..., N) are what each stands for.
    """

    losses: np.ndarray
    weights: np.ndarray

    def net_loss(self, error: float) -> np.ndarray:
        """The upper end of what is lost less what is gained (...), as a part of all differences, 0 to 1."""
        mean = np.maximum(1e-9, self.weights.mean(-1, keepdims=True))
        sizes = self.weights / mean
        shares = upper_ends(self.losses * sizes, sizes, sizes.max(-1), error)
        return np.clip(2 * shares - 1, 0, 1)


@dataclass(frozen=True)
class Observed:
    """All that is known of one query and its merged model; `target` is the ratio to reach."""

    target: float
    blocks: BlockCounts | None = None
    original: OriginalCounts | None = None
    judged: JudgedDifferences | None = None
    labels: LabelledValues | None = None
    shift: LabelledValues | None = None


# Bounds on merged / original ------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class AnswerCosts:
    """What differs, as a part of the original's metric: a value of each block (..., B), the largest of one block."""

    values: np.ndarray
    heaviest: np.ndarray


def cost_answers(observed: Observed, precision: np.ndarray, weights: np.ndarray) -> AnswerCosts:
    """What differs, of an original of this precision in each class (..., C), which has this part of its metric.

    A share of a class is a ratio of two sums over blocks, so each block's value is the whole plus its influence. A
    class without any difference may differ in all of a block that no one saw.
    """
    blocks, original = observed.blocks, observed.original
    assert blocks is not None and original is not None
    price = 1 / np.maximum(1e-9, precision)
    if blocks.added is None:
        price = weights * price
        changes = [(blocks.differ, price)]
    else:
        more = np.broadcast_to(1 / (1 + np.asarray(original.objects)[..., None]), price.shape)
        price = price - observed.target * more
        changes = [(blocks.differ, price), (blocks.added, more)]
    shown = np.maximum(1e-9, blocks.shown.sum(-2, keepdims=True))
    values = np.zeros(blocks.shown.shape[:-1])
    for counts, each in changes:
        rates = counts.sum(-2, keepdims=True) / shown
        influence = blocks.count / shown * (counts - rates * blocks.shown)
        values = values + (each[..., None, :] * (rates + influence)).sum(-1)
    clean, showing = is_clean(blocks), np.maximum(1, (blocks.shown > 0).sum(-2))
    unseen = np.where(clean, price * blocks.count / showing, 0.0).max(-1)
    whole = np.where(clean.all(-1), price.sum(-1), 0.0)
    return AnswerCosts(values, np.maximum(np.maximum(values.max(-1), unseen), whole))


def is_clean(blocks: BlockCounts) -> np.ndarray:
    """Whether nothing differs of each class (..., C)."""
    clean = np.asarray(~blocks.differ.any(-2))
    return clean if blocks.added is None else clean & ~blocks.added.any(-2)


def promised_classes(blocks: BlockCounts, original: OriginalCounts, target: float, error: float) -> np.ndarray:
    """Which classes (..., C) are in so many blocks that losing them would show; the others are not promised."""
    showing = (blocks.shown > 0).sum(-2)
    recall = np.where(showing > 0, original.recall, 0.0)
    parts = recall / np.maximum(1e-9, recall.sum(-1, keepdims=True))
    needed = parts * blocks_needed(target, original.precision, PROOF.unseen * error)
    return (recall > 0) & (showing >= needed)


def blocks_needed(target: float, precision: np.ndarray | float, error: float) -> np.ndarray:
    """So many blocks show a difference, but for `error`, whatever blocks it comes in, if the target is missed."""
    return math.log(1 / error) / ((1 - target) * np.maximum(1e-9, precision))


Nodes = Sequence[tuple[np.ndarray | float, float]]
"""Values of what is uncertain, and how likely each is."""
ALL_LOST: Nodes = ((1.0, 1.0),)


def net_losses(judged: JudgedDifferences) -> Nodes:
    """What is lost less what is gained (...) of all differences, at points of what answers leave open."""
    return [(judged.net_loss(float(ndtr(-point))), share) for point, share in NODES]


@lru_cache(maxsize=32)
def _precision_ends(original: OriginalCounts, error: float) -> np.ndarray:
    """A search for a lower end asks for the same ones again and again."""
    return original.precision_ends(error)


def tail_by_differences(observed: Observed, error: float, nets: Nodes = ALL_LOST) -> np.ndarray:
    """The p-value (...) of a ratio below the target, by agreement alone, as if all that differs were lost, or by nets.

    A lost answer costs at most one right one, so class c, whose part of the metric is w, loses at most w U / p there.
    For a detector F1 falls by at most lost / p + (added - lost) / (1 + objects for each detection). What val leaves
    open of p, and answers of n, is averaged over: that is nearer to the truth than a share of the error for each.
    `error` is that of the query, which boxes that moved and classes that are seldom shown have parts of.
    """
    blocks, original, target = observed.blocks, observed.original, observed.target
    assert blocks is not None and original is not None
    limit = np.asarray(1 - target, float)
    if observed.shift is not None:
        limit = limit - shift_end(observed.shift, PROOF.shift * error)
    promised = promised_classes(blocks, original, target, error)
    recall = np.where(promised, original.recall, 0.0)
    weights = recall / np.maximum(1e-9, recall.sum(-1, keepdims=True))
    effect = design_effect(cost_answers(observed, original.precision, weights).values)
    differs = blocks.differ.any(-1) if blocks.added is None else blocks.differ.any(-1) | blocks.added.any(-1)
    is_lumped = differs.sum(-1) > PROOF.few
    tail = np.zeros(effect.shape)
    for point, share in NODES if len(nets) == 1 else COARSE_NODES:
        costs = cost_answers(observed, _precision_ends(original, float(ndtr(point))), weights)
        for net, part in nets:
            allowed = limit / np.maximum(1e-9, net)
            values = costs.values - allowed[..., None]
            single = tail_of_mean(values, costs.heaviest - allowed, 1 / effect[..., None])
            runs = np.where(is_lumped, tail_of_runs(values), 0.0)
            tail = tail + share * part * np.maximum(single, runs)
    precision = 1 / np.maximum(1e-9, (weights / np.maximum(1e-9, original.precision)).sum(-1))
    showing = (np.where(promised[..., None, :], blocks.shown, 0) > 0).any(-1).sum(-1)
    unseen = np.exp(-(1 - target) * precision * showing / effect) / PROOF.unseen
    return np.where((limit > 0) & promised.any(-1), np.maximum(tail, unseen), 1.0)


def tail_of_runs(values: np.ndarray) -> np.ndarray:
    """The p-value of a true mean of 0 or more, from values (..., B) in order of time that may be alike for minutes.

    Student's t over blocks joined to longer ones, twice as long each time: the length with the largest p-value counts.
    """
    count, tail, length = values.shape[-1], np.zeros(values.shape[:-1]), 2
    whole = values.mean(-1)
    sums = np.concatenate([np.zeros((*values.shape[:-1], 1)), values.cumsum(-1)], -1)
    while count // length >= PROOF.min_joined:
        joined = count // length
        ends = np.linspace(0, count, joined + 1).round().astype(int)
        means = np.diff(sums[..., ends], axis=-1) / np.diff(ends)
        error = np.sqrt(((means - whole[..., None]) ** 2).sum(-1) / (joined - 1) / joined)
        tail = np.maximum(tail, stdtr(PROOF.freedom * (joined - 1), whole / np.maximum(1e-12, PROOF.runs * error)))
        length *= 2
    return tail


def shift_end(shift: LabelledValues, error: float) -> np.ndarray:
    """The upper end of what boxes lose that are found again (...), as a part of the original's hits.

    The heaviest frame or clip is the heaviest seen, or one that loses one object.
    """
    hits = np.maximum(1e-9, shift.original.mean(-1, keepdims=True))
    values = (shift.original - shift.merged) / hits
    heaviest = np.maximum(values.max(-1), 1 / hits[..., 0])
    return upper_ends(values, np.ones_like(values), heaviest, error)


def tail_by_labels(labels: LabelledValues, target: float) -> np.ndarray:
    """The p-value (...) of a merged model whose metric is below the target of its original's, by labels.

    By clips it takes many: one of which nothing is seen could lose everything.
    """
    values = target * labels.original - labels.merged
    return tail_of_mean(values, (target * labels.original - labels.lost).max(-1), labels.counts)


def combine_tails(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """The p-value of two independent ones (Fisher, Statistical Methods for Research Workers, 1932)."""
    product = np.maximum(1e-300, first * second)
    return product * (1 - np.log(product))


def tail_by_source(observed: Observed, source: ProofSource, error: float) -> np.ndarray:
    """The p-value (...) of a ratio below the target by this source, for a test at this error of the query."""
    tails, nets = list[np.ndarray](), ALL_LOST
    if "labels" in source.value:
        assert observed.labels is not None
        tails.append(tail_by_labels(observed.labels, observed.target))
    if "answers" in source.value:
        assert observed.judged is not None
        nets = net_losses(observed.judged)
    if source is not ProofSource.LABELS:
        tails.append(tail_by_differences(observed, error, nets))
    return reduce(combine_tails, tails)


def holds_by(observed: Observed, source: ProofSource, error: float) -> np.ndarray:
    """Whether this source shows (...) that the target is reached; `judged` are answers, if it goes by these."""
    goes_by_shift = observed.shift is not None and source is not ProofSource.LABELS
    rest = (1 - PROOF.shift) * error if goes_by_shift else error
    return tail_by_source(observed, source, error) <= rest


def same_as_original(observed: Observed) -> Observed:
    """What would be observed of a model that answers as its original, without a person's answers."""
    blocks, labels = observed.blocks, observed.labels
    if blocks is not None:
        added = None if blocks.added is None else np.zeros_like(blocks.added)
        blocks = replace(blocks, differ=np.zeros_like(blocks.differ), added=added)
    if labels is not None:
        labels = replace(labels, merged=labels.original)
    return replace(observed, blocks=blocks, labels=labels, judged=None)


# Proofs ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Proof:
    """What is shown of one query: with this `error` merged / original is at least `lower_end`, by this source.

    `agreement` is the part of all answers on the footage that are the original's, `agreement_end` its lower end; None
    without footage.
    """

    proven: bool
    lower_end: float
    source: ProofSource | None
    error: float
    agreement: float | None = None
    agreement_end: float | None = None


def prove_queries(observed: Mapping[str, Observed], errors: Mapping[str, float]) -> dict[str, Proof]:
    """A proof of each query; all share their error (Holm, Scandinavian Journal of Statistics, 1979)."""
    return {query: proofs[0] for query, proofs in prove_chains({q: (o,) for q, o in observed.items()}, errors).items()}


def prove_chains(observed: Mapping[str, Sequence[Observed]], errors: Mapping[str, float]) -> dict[str, list[Proof]]:
    """Proofs of each query's models in a fixed order, each with the whole error of its query.

    A model is proven only if all before it are: that order was fixed before anything was seen, so a false proof has one
    chance a query (Maurer, Hothorn and Lehmacher, 1995). A query whose models are all proven passes its part of the
    error on (Bretz and others, Statistics in Medicine, 2009); with one model each that is Holm's procedure.
    """
    proofs = dict[str, list[Proof]]()
    waiting = list(observed)
    while waiting:
        for query in waiting:
            proofs[query] = [prove_query(one, errors[query] / len(waiting)) for one in observed[query]]
        complete = {query for query in waiting if all(proof.proven for proof in proofs[query])}
        if not complete:
            break
        waiting = [query for query in waiting if query not in complete]
    return proofs


def prove_query(observed: Observed, error: float) -> Proof:
    """The proof of one query at this error; of several sources the one with the highest lower end."""
    ends = {source: find_lower_end(observed, source, error) for source in choose_sources(observed, error)}
    source = max(ends, key=lambda name: ends[name], default=None)
    low = ends[source] if source else 0.0
    agreement = agreement_end = None
    if observed.blocks is not None:
        agreement = 1 - float(observed.blocks.disagreement)
        agreement_end = find_agreement_end(observed.blocks, error)
    return Proof(low >= observed.target, low, source, error, agreement, agreement_end)


def choose_sources(observed: Observed, error: float) -> tuple[ProofSource, ...]:
    """What proves, chosen before differences are seen: one alone where only that could tell, else both together.

    Answers judge what agreement leaves open.
    """
    alone = [ProofSource.LABELS] if observed.labels is not None else []
    if observed.blocks is not None and observed.original is not None:
        alone.append(ProofSource.AGREEMENT)
    if len(alone) == 2:
        same = same_as_original(observed)
        telling = [source for source in alone if bool(holds_by(same, source, error))]
        alone = telling if len(telling) == 1 else [ProofSource.AGREEMENT_AND_LABELS]
    if observed.judged is not None and alone != [ProofSource.LABELS]:
        with_labels = alone == [ProofSource.AGREEMENT_AND_LABELS]
        alone.append(ProofSource.ANSWERS_AND_LABELS if with_labels else ProofSource.ANSWERS)
    return tuple(alone)


def find_lower_end(observed: Observed, source: ProofSource, error: float) -> float:
    """The largest ratio that this source shows."""

    def holds(ratio: float) -> bool:
        if ratio <= 0 or ratio >= 1:
            return ratio <= 0
        return bool(holds_by(replace(observed, target=ratio), source, error))

    return bisect_largest(holds, 0.0, 1.0)


def find_agreement_end(blocks: BlockCounts, error: float) -> float:
    """The lower end of the part of all answers that are the original's."""
    together = BlockCounts(blocks.shown.sum(-1, keepdims=True), blocks.differ.sum(-1, keepdims=True))
    return find_lower_end(Observed(0.0, together, certain_original(1)), ProofSource.AGREEMENT, error)


def certain_original(classes: int) -> OriginalCounts:
    """Of an original whose answers are right by definition, where there are no labels."""
    return OriginalCounts(np.full((1, classes), 1e12), np.zeros((1, classes)), np.ones(classes))


def error_of_look(earlier: int) -> float:
    """The error of a proof on footage at which so many others were looked before, so that their sum stays small."""
    return PROOF.error if earlier == 0 else PROOF.later_looks / 2**earlier
