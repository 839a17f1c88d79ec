"""What every method works with: the originals of a workload, their frames and references, and merged models."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from gemel.merger.assignment import QueryLoad, order_queries, partition
from gemel.merger.checkpoint import Row, State, Step, StepCache, snapshot, snapshots, storable
from gemel.merger.config import MEASUREMENT, MergeOptions
from gemel.merger.distributed import ProcessGroup
from gemel.merger.donors import Donors
from gemel.merger.events import Event
from gemel.merger.init.norms import fixed_norms, match_norm_outputs
from gemel.merger.networks import Joined, adapt_state, answered_by
from gemel.merger.observe import compare_answers, observe
from gemel.merger.proof import Observed
from gemel.merger.reference import ROUNDING, OriginalJudge, Reference, note_evidence
from gemel.merger.scores import match_scores
from gemel.merger.training.data import TrainingSet, default_device
from gemel.merger.training.loop import Training
from gemel.merger.training.recipe import Flops, Recipe
from gemel.merger.training.step_config import MemoryPlan
from gemel.merger.workload_data import LazyDict, WorkloadData
from gemel.models.batchnorm import batchnorms_of, has_folded_norms, is_frozen, recalibrate_batchnorm
from gemel.models.data import PreparedFrames
from gemel.models.detector import Detector
from gemel.models.device import retry_with_smaller_batch
from gemel.models.measures.evaluation import EVIDENCE, Evidence, compare, load_labels, predict, score
from gemel.models.notes import add_note
from gemel.models.predictions import Prediction
from gemel.models.sharing.layers import Layer, layers_of_all, model_bytes, weight_key, weight_of
from gemel.models.sharing.plan import SharingPlan, tie
from gemel.models.stages import Progress, Stages, silent
from gemel.models.tasks import task_of
from gemel.models.workload import Query, Workload
from gemel.models.zoo import build_query, preprocess_of

T = TypeVar("T")
M = TypeVar("M", bound="Merged")


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


@storable
class Ratio(float):
    """What a search goes by; `agreement` is the part of all answers that are the original's."""

    agreement: float

    def __new__(cls, ratio: float, agreement: float = 0.0) -> Ratio:
        """A ratio of a model that was evaluated."""
        made = super().__new__(cls, ratio)
        made.agreement = agreement
        return made


READING, EVALUATING = "reading the models and frames", "evaluating the originals"
"""The stages of `open`."""


class MergeContext:
    """The originals of a workload and their frames (`data`), on one device, and what evaluates merged models.

    `references` are the originals' results, computed on first use; `proves` says whether they are judged
    by what could prove a merge. `group` holds the processes of the merge: all run the same program, each on the frames
    of its own queries (merger.distributed). The keys of `trained` are the queries whose models were trained;
    `documents` are networks as ONNX by architecture, each of which takes seconds to export. A method calls `expect`
    with what bounds the FLOPs to come, or None after a part of them (merger.forecast). `open` leaves queries of which
    nothing could be proven out of `layers` and `judged`, so that they share nothing and keep their weights.

    `bases` are the models that a method starts from: the originals, or another query's network where one answers in
    their place (`substitute`). Then `queries` name that network, `networks` say whose it is, and `root` is the context
    without it.

    `donors` are queries of a bundle, whose networks and layers stay as they are: they are in no mapping by query but
    `originals` and `bases`, which know them by name. `lenders` says from which of them a query may take layers;
    `layers` has theirs, too.
    """

    def __init__(
        self,
        workload: Workload,
        seed: int = 0,
        progress: Progress = silent,
        group: ProcessGroup | None = None,
        donors: Donors | None = None,
    ) -> None:
        self.workload, self.device, self.group = workload, default_device(), group or ProcessGroup()
        self.queries: dict[str, Query] = {query.id: query for query in workload.queries}
        self.layers: list[Layer] = layers_of_all(workload.queries)
        self.data = WorkloadData(workload, self.device, self.group)
        self.donors, self.lenders = donors or Donors(), dict[str, str]()
        self.originals = self.bases = Joined(self.data.originals, self.donors.models)
        self.networks = dict[str, str]()
        self.root, self.test, self.val = self, self.data.test, self.data.val
        self.train, self.search = self.data.train, self.data.search
        self.seed, self.progress, self.evidence_config = seed, progress, EVIDENCE
        self.proves, self.accept_unproven, self.margin = False, False, MergeOptions.margin
        self.judged: list[str] = list(self.queries)
        self.speed, self.evaluating_s = math.inf, 0.0
        self.stages, self.flops, self.memory = Stages(progress), Flops(), MemoryPlan()
        self.trained: dict[str, bool] = {}
        self.expect: Callable[[Callable[[], float] | None], None] = lambda bound: None
        self.documents: dict[str, bytes | None] = {}
        self.references: Mapping[str, Reference] = LazyDict(self.queries, self._evaluate_original)
        self._pieces_loaded = 0
        self.data.reach = lambda done: self.stages.reach(self._pieces_loaded + done)

    def report(self, event: Event, **fields: Any) -> None:
        """Pass an event to the progress."""
        self.progress(event.value, **fields)

    def warn(self, text: str) -> None:
        """Note what happened to the merge as a whole."""
        add_note(self.workload.name, text)

    def begin(self, stage: str, *, flops: float | None = None, pieces: float | None = None) -> None:
        """Begin the next stage of a merge, of at most so many FLOPs or so many `pieces`.

        FLOPs report their progress as they are counted, pieces by `stages.add` or `stages.reach`.
        """
        before = self.flops.total
        self.stages.begin(stage, flops or pieces, is_bound=pieces is None)
        self.flops.on_change = (lambda: None) if flops is None else lambda: self.stages.reach(self.flops.total - before)

    def assign_queries(self) -> list[list[str]]:
        """Give each rank its queries, by what they share, compute and hold; those of each rank."""
        kinds = {query: Counter[str]() for query in self.queries}
        for layer in self.layers:
            if not layer.head:
                kinds[layer.query][layer.wide] += layer.bytes
        loads = {
            name: QueryLoad(float(self.flops.of(query)), model_bytes(query), kinds[name])
            for name, query in self.queries.items()
        }
        parts = partition({query: loads[query] for query in order_queries(loads)}, self.group.size)
        self.group.assign(parts)
        return parts

    def open(self) -> None:
        """Load and evaluate everything now, in two stages, so that bad input is found before any training."""
        parts = self.data.parts
        self.begin(READING, pieces=len(parts) * len(self.group.own(self.queries)))
        self.group.all_gather_object(partial(self._load, parts))
        own, began = self.group.own(self.queries), self.group.clock()
        self.begin(EVALUATING, pieces=sum(self.data.count_frames(query, self.proves) for query in own))
        self.data.add = self.stages.add
        found = self.gather(lambda: {query: self.references[query] for query in own})
        self.evaluating_s, self.data.add = self.group.clock() - began, lambda frames: None
        passes = sum(self.flops.of(query) * len(self.search[query.id]) for query in self.queries.values())
        self.speed = (self.flops.total + passes) / self.evaluating_s if self.evaluating_s > 0 else math.inf
        self.references = {query: found[query] for query in self.queries}
        self.judged = [q for q, one in found.items() if self.accept_unproven or not (one.gap or one.doubt)]
        self.layers = [layer for layer in self.layers if layer.query in self.judged]
        if self.donors.queries:
            own = {query: [layer for layer in self.layers if layer.query == query] for query in self.judged}
            self.lenders = self.run_on_rank0(partial(self.donors.choose_lenders, own, self.originals))
            self.layers += self._lent_layers()
        if self.group.rank == 0:
            note_evidence(self.queries, self.references, self.evidence_config, self.proves, self.accept_unproven)

    def query(self, name: str) -> Query:
        """A query of the merge, or a donor."""
        return self.queries[name] if name in self.queries else self.donors.queries[name]

    def states_that_share(self) -> dict[str, State]:
        """The state of the base of every query that has layers, donors' among them."""
        return {query: self.bases[query].state_dict() for query in dict.fromkeys(layer.query for layer in self.layers)}

    def layers_by_lender(self) -> list[list[Layer]]:
        """The layers of queries that may share with each other: those with one lender, and its own."""
        parts = dict[str | None, list[Layer]]()
        for layer in self.layers:
            is_lent = layer.query in self.donors.queries
            parts.setdefault(layer.query if is_lent else self.lenders.get(layer.query), []).append(layer)
        return list(parts.values())

    def _lent_layers(self) -> list[Layer]:
        return layers_of_all([self.donors.queries[donor] for donor in sorted(set(self.lenders.values()))])

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
                step.value = {}
                for query in queries:
                    with cache.open_step(Step.QUERY, query) as alone:
                        if not alone.done:
                            alone.value = compute(cache, query)
                    step.value[query] = alone.value
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

    def spread_models(
        self, plan: SharingPlan, queries: Iterable[str], states: Mapping[str, State] | None = None
    ) -> dict[str, nn.Module]:
        """Fresh copies, tied; those of other ranks' queries are on the meta device, without values."""
        queries = list(queries)
        own = self.models(self.group.own(queries), states)
        others = {query: build_query(self.queries[query], "meta") for query in queries if query not in own}
        models = {query: own[query] if query in own else others[query].requires_grad_(True) for query in queries}
        tie(models, plan)
        for members in plan.shared:
            present = [member for member in members if member[0] in models]
            held = [member for member in present if member[0] in own]
            if held and present[0] != held[0]:
                first, path = present[0]
                state = (states or {}).get(first) or self.bases[first].state_dict()
                owner, name = weight_of(own[held[0][0]], held[0][1])
                getattr(owner, name).data.copy_(state[weight_key(state, path)])
        return models

    def snapshots(self, models: Mapping[str, nn.Module]) -> dict[str, State]:
        """A copy of the state of each of such models, on all ranks."""
        own = {query: models[query] for query in self.group.own(models)}
        found = {query: state for part in self.group.all_gather_object(lambda: snapshots(own))
                 for query, state in part.items()}  # fmt: skip
        return {query: found[query] for query in models}

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
        network = self.networks.get(query, query)
        if network in self.donors.queries:
            return has_folded_norms(self.originals[network])
        return self.references[network].eval_norms

    def training(self, models: Mapping[str, nn.Module], recipe: Recipe) -> Training:
        """A joint training of these models with the originals as teachers, spread over the ranks of the group.

        Where the outputs of its original are of another form, a model learns from that one's answers instead. Originals
        of other ranks' queries that were loaded to compare weights are dropped.
        """
        own = self.group.own(models)
        if self.group.size > 1:
            self.data.drop_originals()
        taught = [query for query in models if self.train[query].answers is None]
        teachers = {query: self.originals[query] if query in own else models[query] for query in taught}
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
        changed = {name: answered_by(root.queries[name], root.query(donor)) for name, donor in networks.items()}
        found.queries = {name: changed.get(name, query) for name, query in root.queries.items()}
        lent = {name: donor if donor in self.donors.queries else root.lenders.get(donor)
                for name, donor in networks.items()}  # fmt: skip
        found.lenders = {name: donor for name, donor in {**root.lenders, **lent}.items() if donor is not None}
        found.layers = [*layers_of_all([found.queries[name] for name in self.judged]), *found._lent_layers()]
        found.bases = Joined(root.originals, LazyDict(changed, partial(self._adapt_network, networks, states or {})))

        def take_frames(known: Mapping[str, PreparedFrames]) -> Joined[PreparedFrames]:
            return Joined(known, LazyDict(changed, lambda query: self._frames_for(query, known[query.id])))

        found.val, found.search, found.test = map(take_frames, (root.val, root.search, root.test))
        found.train = Joined(root.train, LazyDict(changed, self._training_set_for))
        return found

    def _adapt_network(self, networks: Mapping[str, str], states: Mapping[str, State], query: Query) -> nn.Module:
        model, donor = build_query(query), networks[query.id]
        known = {key: tensor.cpu() for key, tensor in self.originals[donor].state_dict().items()}
        fresh = {**model.state_dict(), **states.get(query.id, {})}
        model.load_state_dict(fresh if query.id in states else adapt_state(query, self.root.query(donor), fresh, known))
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

    def goes_by_agreement(self, query: str) -> bool:
        """Whether a search judges this query's models by what they answer as the original, since that will prove them.

        With `accept_unproven` it goes by their metric, as acceptance does.
        """
        return self.references[query].allowed is not None and not self.accept_unproven

    def ratio(self, query: str, model: nn.Module) -> Ratio:
        """What a search goes by, on its frames: agreement with the original, or the metric over the original's."""
        own, reference, answers = self.root.queries[query], self.references[query], self.answers(query, model)
        agreement = compare_answers(own, reference.answers, answers, reference.threshold).agreement
        if self.goes_by_agreement(query):
            return Ratio(agreement, agreement)
        metric = reference.score_of(own, answers)
        return Ratio(metric / reference.score if reference.score > 0 else 0.0, agreement)

    def answers(self, query: str, model: nn.Module) -> list[Prediction]:
        """The model's answers on the frames that a search goes by."""
        found = self.queries[query]
        self.flops.of(found)  # counted here once, not where a prediction switches off what counting needs
        return predict(model, found, self.search[query], progress=partial(self.flops.add, found))

    def observe(self, query: str, model: nn.Module, answers: Sequence[Prediction] | None = None) -> Observed:
        """What val and footage say of a merged model; `answers` are its own on val, if they are known."""
        own, found, data, blocks = self.root.queries[query], self.queries[query], self.data, None
        val, proof = data.val_answers[query], data.footage[query]
        if proof is not None and proof.places:
            frames = self._frames_for(found, proof.frames)
            after = predict(model, found, frames, progress=partial(self.flops.add, found), places=proof.places)
            differences = compare_answers(own, data.footage_answers[query], after, val.threshold)
            blocks = differences.by_block(proof.blocks, proof.seconds)
        if val.is_labelled and answers is None:
            answers = self.answer_val(query, model)
        return observe(own, val, answers if val.is_labelled else None, blocks)

    def answer_val(self, query: str, model: nn.Module) -> list[Prediction]:
        """A model's answers on val."""
        found = self.queries[query]
        return predict(model, found, self.val[query], progress=partial(self.flops.add, found))

    def plain_ratio(self, query: str, answers: Sequence[Prediction]) -> float:
        """The metric of these answers on val over the original's."""
        own, val = self.root.queries[query], self.data.val_answers[query]
        before, after = (
            score(task_of(own), side, val.truths, own.classes, val.threshold) for side in (val.answers, answers)
        )
        return after / before if before > 0 else 0.0

    def required_ratio(self, query: str) -> float:
        """The ratio from which a search is content: `margin` of the way from the least one to 1.

        One error more than the original's is accepted if the least ratio itself allows it.
        """
        least, reference = self.trial_ratio(query), self.references[query]
        one_error = reference.one_error
        if self.goes_by_agreement(query):
            one_error = (1 + ROUNDING) / max(1, len(reference.answers))
        return max(least, min(least + self.margin * (1 - least), 1 - one_error))

    def trial_ratio(self, query: str) -> float:
        """The ratio from which a query is tried: below it proofs would refuse it."""
        allowed = self.references[query].allowed
        if allowed is None or self.accept_unproven:
            return self.queries[query].accuracy_target
        return 1 - allowed

    def evidence(self, query: str, model: nn.Module | None) -> Evidence:
        """Merged against original on test; without a model the original against itself."""
        own, found, test, report = self.root.queries[query], self.queries[query], self.test[query], self.stages.add
        before = predict(self.originals[query], own, self.root.test[query], progress=report)
        after = before if model is None else predict(model, found, test, progress=report)
        reference = self.references[query]
        return compare(found, test.split, before, after, reference.threshold, config=self.evidence_config)

    def _load(self, parts: Sequence[Mapping[str, Any]]) -> None:
        for part in parts:
            for query in filter(self.group.owns, self.queries):
                part[query]
                self._pieces_loaded += 1
                self.stages.reach(self._pieces_loaded)

    def _evaluate_original(self, query: Query) -> Reference:
        judge = OriginalJudge(self.data, self.evidence_config, self.proves, self.report, self.stages.add)
        reference = judge.evaluate(query)
        if reference.doubt and not self.accept_unproven:
            return reference  # it keeps its own weights, so nothing trains its norms
        if self._needs_eval_norms(query, reference):
            self.warn(f"{query.id}: BatchNorm recalibration harms its original; its norms stay in eval mode")
            return replace(reference, eval_norms=True)
        return reference

    def _needs_eval_norms(self, query: Query, reference: Reference) -> bool:
        """Whether the model's norms are folded (also into affines), or a recalibrated original loses accuracy."""
        model = copy.deepcopy(self.originals[query.id]).requires_grad_(True)
        if has_folded_norms(model) or fixed_norms(model, eval_norms=False):
            return True
        for frames in (MEASUREMENT.settling_frames, MEASUREMENT.recalibration_frames):  # the second confirms the first
            if not recalibrate(self, query.id, model, frames):
                return False
            metric = reference.score_of(query, self.answers(query.id, model))
            if metric >= MEASUREMENT.recalibration_min_ratio * reference.score:
                return False
        return True


storable(SharingPlan)


@storable
@dataclass(frozen=True)
class Merged:
    """A plan and the state of every query's model under it; `networks` as in MergeContext."""

    plan: SharingPlan
    states: Mapping[str, State]
    networks: Mapping[str, str] = field(default_factory=dict)

    def join(self: M, other: Merged) -> M:
        """This and what another one has of other queries."""
        plan = SharingPlan(self.plan.shared + other.plan.shared)
        states, networks = {**self.states, **other.states}, {**self.networks, **other.networks}
        return replace(self, plan=plan, states=states, networks=networks)

    def complete(self, ctx: MergeContext) -> Merged:
        """This with the base of every query that has no state."""
        return replace(
            self, states={query: self.states.get(query) or snapshot(ctx.bases[query]) for query in ctx.queries}
        )
