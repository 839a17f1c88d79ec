"""What every method works with: the originals of a workload, their frames, references on val, and merged models."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from merger.acceptance import ACCEPTANCE, Proof, cut_val, find_doubt, search_ratio
from merger.checkpoint import Row, State, Step, StepCache, snapshot, storable
from merger.config import MEASUREMENT
from merger.distributed import ProcessGroup
from merger.events import Event, Progress, Stages, silent
from merger.init.norms import fixed_norms, match_norm_outputs
from merger.networks import Joined, adapt_state, answered_by
from merger.scores import match_scores, scores_of
from merger.training.data import TrainingSet, default_device
from merger.training.loop import Training
from merger.training.recipe import Flops, Recipe
from merger.training.step_config import MemoryPlan
from models.batchnorm import batchnorms_of, has_folded_norms, is_frozen, recalibrate_batchnorm
from models.data import PreparedFrames, load_split
from models.detector import Detector
from models.device import retry_with_smaller_batch
from models.errors import InputError, join_names
from models.evaluation import (
    EVIDENCE,
    Evidence,
    compare,
    count_samples,
    evidence_hint,
    find_gap,
    find_weakness,
    is_competent,
    load_labels,
    predict,
    score,
    tallies_by_unit,
    threshold_without_labels,
)
from models.intervals import p_value_below
from models.notes import add_note
from models.predictions import GroundTruth, Prediction
from models.preprocess_check import describe_preprocess_problem
from models.sharing.layers import Layer, layers_of_all
from models.sharing.plan import SharingPlan, tie
from models.tasks import task_of
from models.tasks.classification import Classification
from models.weights import load_weights
from models.workload import Query, Workload
from models.zoo import build_query, preprocess_of

T = TypeVar("T")
Made = TypeVar("Made")
ROUNDING = 1e-6
MAX_CLASSES = 20
"""Classes that one note names."""


TRAIN_HINT = "train it longer, on more frames, or give other weights"


class LazyDict(Mapping[str, Made]):
    """Query id -> what `make` makes of the query, once."""

    def __init__(self, queries: Mapping[str, Query], make: Callable[[Query], Made]) -> None:
        self._queries, self._make = queries, make
        self._made: dict[str, Made] = {}

    def __getitem__(self, query: str) -> Made:
        if query not in self._made:
            self._made[query] = self._make(self._queries[query])
        return self._made[query]

    def __iter__(self) -> Iterator[str]:
        return iter(self._queries)

    def __len__(self) -> int:
        return len(self._queries)


@dataclass(frozen=True)
class Reference:
    """An original's result on val: the labels, the score from which its detections count, and its metric.

    `truths`, `score`, `one_error` (the part of the metric that one wrong answer costs) and `tallies` (the counts of
    each frame) are of the frames `places` of val that a search uses, None for all; `proof` is the part that accepts,
    None where nothing is proved; `doubt` says why val is too small for that;
    `detections` is the number of a detector's detections on some train frames (merger.scores). `eval_norms`: the norms
    are folded, or recalibration harms the original, so its norms stay in eval mode for the whole merge. `gap` says why
    val or test is no evidence, empty where both are; `unjudged` are classes with too few samples in val, with these.
    """

    truths: Sequence[GroundTruth]
    threshold: float
    score: float
    one_error: float
    tallies: np.ndarray
    detections: int = 0
    eval_norms: bool = False
    places: Sequence[int] | None = None
    proof: Proof | None = None
    doubt: str = ""
    gap: str = ""
    unjudged: Mapping[str, int] = field(default_factory=dict)


def find_class_order(query: Query, answers: Sequence[Any], labels: Sequence[GroundTruth]) -> tuple[str, ...] | None:
    """The order of the classes in which the answers fit the labels, if it is another one than the query's.

    Each output gets the label of most frames that it is the answer to; None when two outputs get the same label, or
    when the answers would still prove nothing.
    """
    met = {name: Counter[GroundTruth]() for name in query.classes}
    for answer, label in zip(answers, labels, strict=True):
        met[answer.label][label] += 1
    best = [one.most_common(1)[0] for one in met.values() if one]
    order, right = tuple(str(label) for label, _ in best), sum(count for _, count in best) / len(labels)
    another = set(order) == set(query.classes) and order != query.classes
    return order if another and is_competent(query, right) else None


def evaluate_original(ctx: MergeContext, query: Query) -> Reference:
    """The reference of one query; progress reports it and what makes it weak evidence."""
    task, val = task_of(query), ctx.val[query.id]
    answers = predict(ctx.originals[query.id], query, val, progress=ctx.stages.add)
    labels = val.split.labels
    threshold = task.choose_threshold(answers, labels) if labels is not None else threshold_without_labels(query)
    truths = load_labels(query, val.split, answers, threshold)
    reached = score(task, answers, truths, query.classes, threshold)
    needed = query.accuracy_target * reached  # the target is a ratio, so what it asks for depends on the original
    metric = task.metric_name(labels is not None)
    ctx.report(Event.REFERENCE, query=query.id, metric=metric, val=reached, needed=needed)
    order = find_class_order(query, answers, labels) if isinstance(task_of(query), Classification) and labels else None
    if order is not None:
        text = f"{query.id}: the original's predictions fit the labels if its outputs are named {join_names(order)}, in"
        ctx.warn(f"{text} this order; list `classes` in this order, or check the weights")
    elif problem := describe_preprocess_problem(query, ctx.originals[query.id], val.split, reached):
        ctx.warn(problem)
    elif not is_competent(query, reached):
        text = f"{query.id}: its original reaches only {reached:.2f} {metric} on val, which is no evidence"
        ctx.warn(f"{text}; train it longer, or on more frames")
    units = len(set(val.split.units))
    if units < MEASUREMENT.min_val_units:
        what = "clip or track" if units == 1 else "clips or tracks"
        ctx.warn(f"{query.id}: its val split has only {units} {what}; its accuracy may not generalize")
    found = 0
    if isinstance(ctx.originals[query.id], Detector):
        found = int((scores_of(ctx.originals[query.id], query, ctx.train[query.id]) >= threshold).sum())
    samples, few = count_samples(query, truths), ctx.evidence_config.min_samples
    unjudged = {name: samples[name] for name in query.classes if samples[name] < few}
    gap = find_gap(query, val.split, truths, ctx.evidence_config) or _test_gap(ctx, query, threshold)
    gap = gap or find_weakness(query, val.split.name, reached, ctx.evidence_config)
    places, proof, doubt = _divide_val(ctx, query, answers, truths, threshold)
    searched = range(len(val)) if places is None else places
    own = [truths[place] for place in searched]
    tallies = task.tallies([answers[place] for place in searched], own, query.classes, threshold)
    reached, one_error = task.metric_of(tallies.sum(axis=0)), one_error_of(query, own, tallies)
    reference = Reference(
        own, threshold, reached, one_error, tallies, found, False, places, proof, doubt, gap, unjudged
    )
    if _needs_eval_norms(ctx, query, reference):
        ctx.warn(f"{query.id}: BatchNorm recalibration harms its original; its norms stay in eval mode")
        return replace(reference, eval_norms=True)
    return reference


def one_error_of(query: Query, truths: Sequence[GroundTruth], tallies: np.ndarray) -> float:
    """The part of the original's metric that one wrong answer costs."""
    task = task_of(query)
    reached = task.metric_of(tallies.sum(axis=0))
    return task.one_error(truths, query.classes) * (1 + ROUNDING) / reached if reached > 0 else 1.0


def _divide_val(
    ctx: MergeContext, query: Query, answers: Sequence[Prediction], truths: Sequence[GroundTruth], threshold: float
) -> tuple[list[int] | None, Proof | None, str]:
    """The frames of val to search on, the part that accepts, and why val cannot tell; all of val where it does not."""
    if not ctx.interval:
        return None, None, ""
    split = ctx.val[query.id].split
    searched, kept = cut_val(query, split, truths)
    own, part = [truths[place] for place in kept], split.at(kept)
    tallies = tallies_by_unit(query, part, [answers[place] for place in kept], own, threshold)
    one_error = one_error_of(query, own, tallies) if kept else 1.0
    doubt = find_doubt(len(split), one_error, query.accuracy_target, len(ctx.queries) - 1) or (
        "cannot be told with a single frame of val" if not searched else ""
    )
    return (None, None, doubt) if doubt else (searched, Proof(kept, own, one_error, tallies), "")


def _test_gap(ctx: MergeContext, query: Query, threshold: float) -> str:
    """Why test is no evidence: of its labels, or of the original's answers."""
    test, answers = ctx.test[query.id], list[Prediction]()
    if test.split.labels is None:
        answers = predict(ctx.originals[query.id], query, test, progress=ctx.stages.add)
    return find_gap(query, test.split, load_labels(query, test.split, answers, threshold), ctx.evidence_config)


def _needs_eval_norms(ctx: MergeContext, query: Query, reference: Reference) -> bool:
    """Whether the model's norms are folded (also into affines), or a recalibrated original loses accuracy on val."""
    model = copy.deepcopy(ctx.originals[query.id]).requires_grad_(True)
    if has_folded_norms(model) or fixed_norms(model, eval_norms=False):
        return True
    for frames in (MEASUREMENT.settling_frames, MEASUREMENT.recalibration_frames):  # the second only confirms the first
        if not recalibrate(ctx, query.id, model, frames):
            return False
        metric = task_of(query).metric_of(ctx.tallies(query.id, model, reference).sum(axis=0))
        if metric >= MEASUREMENT.recalibration_min_ratio * reference.score:
            return False
    return True


def recalibrate(ctx: MergeContext, query: str, model: nn.Module, frames: int) -> bool:
    """Measure the running statistics of the model's unfrozen norms again on train frames, augmented as in training.

    Frames pass in even, shuffled chunks: neighbouring frames show one clip or class, and the mean variance of such
    chunks is below the variance of all. Returns False without norms, or with fewer than two frames.
    """
    data = ctx.train[query]
    count = min(len(data), frames)
    if all(map(is_frozen, batchnorms_of(model))) or count < 2:
        return False
    mixed = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    indices = torch.linspace(0, len(data) - 1, count).long()[mixed]

    def measure(batch: int) -> None:
        draws = torch.Generator().manual_seed(0)
        chunks = indices.tensor_split(math.ceil(count / batch))
        recalibrate_batchnorm(
            model, (data.model_input(data.batch(one.tolist(), draws)[0], ctx.device) for one in chunks)
        )

    largest = min(MEASUREMENT.recalibration_batch, count)
    retry_with_smaller_batch(largest, measure, MEASUREMENT.min_recalibration_batch)
    ctx.flops.add(ctx.queries[query], count)
    return True


def _with_margin(target: float, margin: float, one_error: float) -> float:
    """`margin` of the way from the target to 1; one error more than the original's, if the target itself allows it."""
    return max(target, min(target + margin * (1 - target), 1 - one_error))


READING, EVALUATING = "reading the models and frames", "evaluating the originals"
"""The stages of `open`."""


class MergeContext:
    """The originals of a workload and their frames of each split, on one device; loaded and checked on first use.

    `references` are the originals' results on val, computed on first use unless given. With `interval` merged models
    are compared by the lower end of a confidence interval. `group` holds the processes of the merge: all run the same
    program, each on the frames of its own queries (merger.distributed); frames of other ranks' queries are decoded on
    demand. The keys of `trained` are the queries whose models were trained. `open` leaves queries without evidence out
    of `layers` and `judged`, so that they share nothing and keep their weights. InputError for a weights file that is
    missing or does not fit, or a frame that does not decode.

    `bases` are the models that a method starts from: the originals, or another query's network where one answers in
    their place (`substitute`). Then `queries` name that network, `networks` say whose it is, and `root` is the context
    without it.
    """

    def __init__(
        self,
        workload: Workload,
        seed: int = 0,
        progress: Progress = silent,
        device: torch.device | None = None,
        references: Mapping[str, Reference] | None = None,
        group: ProcessGroup | None = None,
    ) -> None:
        self.workload, self.device, self.group = workload, device or default_device(), group or ProcessGroup()
        self.queries: dict[str, Query] = {query.id: query for query in workload.queries}
        self.layers: list[Layer] = layers_of_all(workload.queries)
        self.originals: Mapping[str, nn.Module] = LazyDict(self.queries, self._load_original)
        self.bases, self.networks, self.root = self.originals, dict[str, str](), self
        self.test: Mapping[str, PreparedFrames] = LazyDict(self.queries, partial(self._decode_split, "test"))
        self.train: Mapping[str, TrainingSet] = LazyDict(self.queries, self._load_training_set)
        self.val: Mapping[str, PreparedFrames] = LazyDict(self.queries, partial(self._decode_split, "val"))
        self.interval, self.seed, self.progress, self.evidence_config = False, seed, progress, EVIDENCE
        self.accept_unproven = False
        self.judged: list[str] = list(self.queries)
        self.speed = math.inf
        self.stages, self.flops, self.memory = Stages(progress), Flops(), MemoryPlan(progress=progress)
        self.trained: dict[str, bool] = {}
        self.references = LazyDict(self.queries, partial(evaluate_original, self)) if references is None else references
        self._pieces_loaded = 0

    def report(self, event: Event, **fields: Any) -> None:
        """Pass an event to the progress."""
        self.progress(event.value, **fields)

    def warn(self, text: str) -> None:
        """Report a warning."""
        self.report(Event.WARNING, text=text)

    def begin(self, stage: str, *, flops: float | None = None, pieces: float | None = None) -> None:
        """Begin the next stage of a merge, of at most so many FLOPs or so many `pieces`.

        FLOPs report their progress as they are counted, pieces by `stages.add` or `stages.reach`.
        """
        before = self.flops.total
        self.stages.begin(stage, pieces if flops is None else flops)
        self.flops.on_change = (lambda: None) if flops is None else lambda: self.stages.reach(self.flops.total - before)

    def open(self) -> None:
        """Load and evaluate everything now, in two stages, so that bad input is found before any training."""
        parts = (self.originals, self.test, self.train, self.val)
        self.begin(READING, pieces=len(parts) * len(self.queries))
        self.group.all_gather_object(partial(self._load, parts))
        pieces = [len(one) for one in self.test.values() if one.split.labels is None]
        self.begin(EVALUATING, pieces=sum(map(len, self.val.values())) + sum(pieces))
        own, began = self.group.own(self.queries), self.group.clock()
        found = self.gather(lambda: {query: self.references[query] for query in own})
        seconds = self.group.clock() - began
        passes = sum(self.flops.of(query) * len(self.val[query.id]) for query in self.queries.values())
        self.speed = (self.flops.total + passes) / seconds if seconds > 0 else math.inf
        self.references = {query: found[query] for query in self.queries}
        self.judged = [q for q, one in found.items() if not one.gap and (self.accept_unproven or not one.doubt)]
        self.layers = [layer for layer in self.layers if layer.query in self.judged]
        if self.group.rank == 0:
            self._note_evidence()

    def _note_evidence(self) -> None:
        """Note the queries without evidence, and the classes that val shows too seldom."""
        few = self.evidence_config.min_samples
        for query, one in self.references.items():
            if one.gap:
                is_weak = one.gap.startswith("its original reaches only")
                hint = TRAIN_HINT if is_weak else evidence_hint(self.queries[query], self.evidence_config)
                add_note(query, f"no evidence: {one.gap}; it keeps its own weights and counts as not met", hint)
            if one.doubt and not one.gap:
                what = "a plain ratio on val accepts it" if self.accept_unproven else "it keeps its own weights"
                add_note(query, f"its accuracy {one.doubt}; {what}", "add val frames, or give --accept-unproven")
            if one.unjudged and not one.gap:
                names = [
                    f"{name} ({count} times)" if count else f"{name} (never)" for name, count in one.unjudged.items()
                ]
                add_note(query, f"val shows some classes fewer than {few} times: {join_names(names, MAX_CLASSES)}",
                         "losing them would hardly show; add footage of them")  # fmt: skip

    def run_on_rank0(self, compute: Callable[[], T]) -> T:
        """The result of rank 0, computed alone, for all ranks; its FLOPs count on all."""
        if self.group.size == 1:
            return compute()
        found, self.flops.total = self.group.run_on_rank0(lambda: (compute(), self.flops.total))
        return found

    def gather(self, compute: Callable[[], Mapping[str, T]]) -> dict[str, T]:
        """The results of all ranks by name, each computed alone; FLOPs are summed, and rank 0 reports all events."""
        if self.group.size == 1:
            return dict(compute())
        before, progress, events = self.flops.total, self.progress, list[tuple[str, Mapping[str, Any]]]()
        if self.group.rank:
            self.progress = lambda event, **fields: events.append((event, fields))
        try:
            ranks = self.group.all_gather_object(
                lambda: (dict(compute()), self.flops.total - before, events, self.trained)
            )
        finally:
            self.progress = progress
        self.flops.total, results = before, dict[str, T]()
        for found, flops, others, trained in ranks:
            results |= found
            self.flops.total += flops
            self.trained.update(trained)
            for event, fields in others:
                self.progress(event, **fields)
        return dict(sorted(results.items()))

    def for_each_query(
        self, cache: StepCache, name: str, queries: Iterable[str], compute: Callable[[StepCache, str], T], *parts: str
    ) -> dict[str, T]:
        """`compute(cache, query)` of each query: a step of the cache as a whole and, in one process, each.

        With several ranks each computes its own queries, and an interruption repeats the whole step.
        """
        queries, own = list(queries), self.group.own(queries)

        def compute_alone(query: str) -> tuple[T, list[Row], float, float]:
            memory, before = StepCache(), self.flops.total
            memory.meter = self.flops
            return compute(memory, query), memory.log, before, self.flops.total - before

        with cache.open_step(name, *parts) as step:
            if not step.done and self.group.size == 1:
                step.value = {one: cache.step(Step.QUERY, partial(compute, cache, one), one) for one in queries}
            elif not step.done:
                cache.step(Step.BEGUN, lambda: None)  # FLOPs that an interruption cut short are not counted
                counted = self.flops.total
                found = self.gather(lambda: {query: compute_alone(query) for query in own})
                step.value = {query: found[query][0] for query in queries}
                for _, rows, before, flops in (found[query] for query in queries):
                    for row in rows:
                        cache.add_row({**row, "flops": row["flops"] - before + counted})
                    counted += flops
        return step.value

    def models(self, queries: Iterable[str], states: Mapping[str, State] | None = None) -> dict[str, nn.Module]:
        """Fresh copies of these queries' models, with the weights of `states` or the bases'."""
        made = {}
        for query in queries:
            model = made[query] = copy.deepcopy(self.bases[query]).requires_grad_(True)
            if states is not None and query in states:
                model.load_state_dict({**model.state_dict(), **states[query]})
        return made

    def tie_models(
        self, plan: SharingPlan, queries: Iterable[str], states: Mapping[str, State] | None = None
    ) -> dict[str, nn.Module]:
        """Fresh copies, tied, with their BatchNorm statistics recalibrated."""
        models = self.models(queries, states)
        tie(models, plan)
        for query, model in models.items():
            if query in plan.queries():
                self.recalibrate(query, model)
        return models

    def recalibrate(self, query: str, model: nn.Module, frames: int = MEASUREMENT.recalibration_frames) -> bool:
        """Fit the norms to weights that changed; False if the model has no norms that could be.

        BatchNorm statistics are measured again; scales and shifts of norms that stay in eval mode are matched with the
        original's output statistics (merger.init.norms).
        """
        if names := fixed_norms(model, self.has_eval_norms(query)):
            self._match_norms(query, model, names, frames)
            return True
        return not self.has_eval_norms(query) and recalibrate(self, query, model, frames)

    def _match_norms(self, query: str, model: nn.Module, names: Collection[str], frames: int) -> None:
        data = self.train[query]

        def match(count: int) -> None:
            indices = torch.linspace(0, len(data) - 1, count).long().tolist()
            images = data.model_input(data.batch(indices, torch.Generator().manual_seed(0))[0], self.device)
            match_norm_outputs(model, self.bases[query], names, images)
            self.flops.add(self.queries[query], 2 * count)

        retry_with_smaller_batch(min(len(data), frames, MEASUREMENT.matching_frames), match)

    def has_eval_norms(self, query: str) -> bool:
        """Whether the norms of the network that answers the query stay in eval mode."""
        return self.references[self.networks.get(query, query)].eval_norms

    def training(self, models: Mapping[str, nn.Module], recipe: Recipe) -> Training:
        """A joint training of these models with the originals as teachers, spread over the ranks of the group.

        Where the outputs of its original are of another form, a model learns from that one's answers instead.
        """
        teachers = {query: self.originals[query] for query in models if self.train[query].answers is None}
        return Training(
            models, self.train, recipe, self.flops, teachers, memory=self.memory,
            group=self.group, eval_norms=[query for query in models if self.has_eval_norms(query)],
        )  # fmt: skip

    def substitute(self, networks: Mapping[str, str], states: Mapping[str, State] | None = None) -> MergeContext:
        """This context with queries answered by the networks of others: query -> the query whose network it is.

        Their models start from `states`, or as the other's original with the outputs of their own classes.
        """
        if not networks:
            return self
        found, root = copy.copy(self), self.root
        found.networks = dict(networks)
        changed = {name: answered_by(root.queries[name], root.queries[donor]) for name, donor in networks.items()}
        found.queries = {name: changed.get(name, query) for name, query in root.queries.items()}
        found.layers = layers_of_all([found.queries[name] for name in self.judged])
        found.bases = Joined(root.originals, LazyDict(changed, partial(self._adapt_network, networks, states or {})))
        found.val = Joined(root.val, LazyDict(changed, lambda query: self._frames_for(query, root.val[query.id])))
        found.test = Joined(root.test, LazyDict(changed, lambda query: self._frames_for(query, root.test[query.id])))
        found.train = Joined(root.train, LazyDict(changed, self._training_set_for))
        return found

    def _adapt_network(self, networks: Mapping[str, str], states: Mapping[str, State], query: Query) -> nn.Module:
        model, donor = build_query(query), networks[query.id]
        known = {key: tensor.cpu() for key, tensor in self.originals[donor].state_dict().items()}
        fresh = {**model.state_dict(), **states.get(query.id, {})}
        model.load_state_dict(
            fresh if query.id in states else adapt_state(query, self.root.queries[donor], fresh, known)
        )
        return model.to(self.device, memory_format=torch.channels_last).eval().requires_grad_(False)  # type: ignore

    def _frames_for(self, query: Query, known: PreparedFrames) -> PreparedFrames:
        """The frames of a split as the network that answers the query takes them."""
        if preprocess_of(query) == preprocess_of(self.root.queries[query.id]):
            return known
        found = PreparedFrames(query, known.split)
        return found.load() if self.group.owns(query.id) else found

    def _training_set_for(self, query: Query) -> TrainingSet:
        """Its train frames; where outputs cannot be compared with its original's, labelled by that."""
        own = self.root.train[query.id]
        answers = None
        changed = (query.model, preprocess_of(query).size) != (own.query.model, preprocess_of(own.query).size)
        if query.task != "classification" and changed:
            answers = own.prepared.split.labels or load_labels(
                own.query, own.prepared.split, predict(self.originals[query.id], own.query, own.prepared),
                self.references[query.id].threshold,
            )  # fmt: skip
        return TrainingSet(query, self._frames_for(query, own.prepared), own, answers)

    def match_scores(self, query: str, model: nn.Module) -> State:
        """Shift a detector's scores until as many reach the threshold as its original's; the biases that moved."""
        if not isinstance(model, Detector):
            return {}
        reference, found, data = self.references[query], self.queries[query], self.train[query]
        moved, passes = match_scores(model, found, data, reference.threshold, reference.detections)
        self.flops.add(found, passes)
        return moved

    def ratio(self, query: str, model: nn.Module, strict: bool = False) -> float:
        """The model's metric over its original's on the part of val that is searched on.

        Where another part accepts (`Reference.proof`) it is the lower end of that ratio's interval; unless `strict`, a
        model with no more errors than its original has its plain ratio, and so has any with `accept_unproven`.
        """
        reference, task = self.references[query], task_of(self.queries[query])
        tallies = self.tallies(query, model, reference)
        ratio = task.metric_of(tallies.sum(axis=0)) / reference.score if reference.score > 0 else 0.0
        if reference.proof is None or (self.accept_unproven and not strict):
            return ratio
        return search_ratio(task, ratio, reference.tallies, tallies, reference.one_error, strict)

    def prove(self, query: str, model: nn.Module) -> tuple[float, bool]:
        """The p-value of a ratio below the query's target, on the part of val that accepts, and whether it comes near.

        `accept_unproven` goes by that: the plain ratio has a margin above the target, or the p-value is small.
        """
        found, val, reference = self.queries[query], self.val[query], self.references[query]
        task, proof = task_of(found), reference.proof
        assert proof is not None
        answers = predict(model, found, val, progress=partial(self.flops.add, found), places=proof.frames)
        tallies = tallies_by_unit(found, val.split.at(proof.frames), answers, proof.truths, reference.threshold)
        before, after = (task.metric_of(side.sum(axis=0)) for side in (proof.tallies, tallies))
        near = after >= before * _with_margin(found.accuracy_target, ACCEPTANCE.unproven_margin, proof.one_error)
        p_value = p_value_below(task, proof.tallies, tallies, proof.one_error, found.accuracy_target)
        return p_value, near or p_value <= ACCEPTANCE.unproven_error

    def confirms(self, query: str, model: nn.Module) -> bool:
        """Whether a search may rely on its own part of val; with `accept_unproven` the part that accepts must agree.

        Few frames hold a target by luck, and a query that is refused at the end shares nothing.
        """
        unproven = self.accept_unproven and self.references[query].proof is not None
        return not unproven or self.prove(query, model)[1]

    def tallies(self, query: str, model: nn.Module, reference: Reference) -> np.ndarray:
        """The model's counts on each frame of val that is searched on."""
        found, val = self.queries[query], self.val[query]
        self.flops.of(found)  # counted here once, not where a prediction switches off what counting needs
        answers = predict(model, found, val, progress=partial(self.flops.add, found), places=reference.places)
        return task_of(found).tallies(answers, reference.truths, found.classes, reference.threshold)

    def required_ratio(self, query: str, margin: float | None = None) -> float:
        """The ratio on val from which a query is accepted: its target, or `margin` of the way from there to 1.

        With a margin, one error more than the original's is accepted if the target itself allows it. With
        `accept_unproven`, and where val cannot tell, there is a margin in any case.
        """
        target, reference = self.queries[query].accuracy_target, self.references[query]
        if margin is None and (reference.doubt or self.accept_unproven):
            margin = ACCEPTANCE.unproven_margin
        if margin is None:
            return target
        return _with_margin(target, margin, reference.one_error)

    def least_ratio(self, query: str, required: float) -> float:
        """The ratio on val below which a query gets its original back without a look at the part that accepts.

        With `accept_unproven` that part has a margin of its own, so above the target alone it decides.
        """
        decides = self.accept_unproven and self.references[query].proof is not None
        return min(required, self.queries[query].accuracy_target) if decides else required

    def evidence(self, query: str, model: nn.Module | None) -> Evidence:
        """Merged against original on test; without a model the original against itself."""
        own, found, test, report = self.root.queries[query], self.queries[query], self.test[query], self.stages.add
        before = predict(self.originals[query], own, self.root.test[query], progress=report)
        after = before if model is None else predict(model, found, test, progress=report)
        reference = self.references[query]
        return compare(
            found, test.split, before, after, reference.threshold, self.seed, reference.gap, self.evidence_config
        )

    def _load(self, parts: Sequence[Mapping[str, Any]]) -> None:
        for part in parts:
            for query in self.queries:
                part[query]
                self._pieces_loaded += 1
                self.stages.reach(self._pieces_loaded)

    def _load_original(self, query: Query) -> nn.Module:
        if query.weights is None:
            raise InputError(self.workload.path, "no weights are named", "add `weights:`", f"queries.{query.id}")
        if not query.weights.exists():
            hint = f"correct the path, or run `gemel train {self.workload.path.name}`"
            raise InputError(str(query.weights), f"does not exist (query {query.id})", hint, "weights")
        model = build_query(query)
        load_weights(query, model)
        return model.to(self.device, memory_format=torch.channels_last).eval().requires_grad_(False)  # type: ignore

    def _load_training_set(self, query: Query) -> TrainingSet:
        found = TrainingSet(query, self._decode_split("train", query))
        if self.group.owns(query.id):
            _ = found.targets  # labels that are none are found now
        return found

    def _decode_split(self, name: str, query: Query) -> PreparedFrames:
        found = PreparedFrames(query, load_split(query, name))
        if not self.group.owns(query.id):
            return found
        return found.load(lambda done: self.stages.reach(self._pieces_loaded + done))


storable(SharingPlan)


@storable
@dataclass(frozen=True)
class Merged:
    """A plan and the state of every query's model under it; `networks` as in MergeContext."""

    plan: SharingPlan
    states: Mapping[str, State]
    networks: Mapping[str, str] = field(default_factory=dict)

    def without(self, queries: Iterable[str]) -> Merged:
        """The queries that still share once these are out of the plan."""
        plan = self.plan.without(*queries)
        return Merged(plan, {query: self.states[query] for query in plan.queries()}, self.networks)

    def complete(self, ctx: MergeContext) -> Merged:
        """This with the base of every query that has no state."""
        return replace(
            self, states={query: self.states.get(query) or snapshot(ctx.bases[query]) for query in ctx.queries}
        )
