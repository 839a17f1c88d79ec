"""Everything a method works with: the originals, their frames, their scores, and how a merged model compares."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from merger.bench.ondemand import OnDemand
from merger.bench.scores import match_scores, scores_of
from merger.journal.progress import Progress, silent
from merger.journal.steps import Journal
from merger.training.loop import Recipe, Training, TrainingSet, Work
from merger.training.precision import FRAMES, Precisions, Settled
from merger.workers.jobs import Threads, Workers
from models.detector import Detector
from models.errors import InputError
from models.frames.data import load_split
from models.frames.prepared import Prepared
from models.measuring.evaluation import Evidence, compare, predict, score, truths_of, worth_keeping
from models.parts.low_rank import factorise, with_ranks
from models.parts.norms import at_rest, calibrate_norms, norms_of
from models.parts.residual import attach
from models.sharing.layers import Layer, layers_of_all
from models.sharing.plan import SharingPlan, tie
from models.tasks import Truth, task_of
from models.weights.reading import load_weights
from models.workload import Query, Workload
from models.zoo import build_query

State = dict[str, Tensor]
CALIBRATION_FRAMES = 256
ROUNDING = 1e-6
FEW_UNITS = 10
"""Clips or tracks of val below which a query is reported: its frames are many, what they can tell is not."""


def default_device() -> torch.device:
    """The GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class Merged:
    """A plan and the state of every query's model under it."""

    plan: SharingPlan
    states: Mapping[str, State]

    def to_plain(self) -> dict[str, Any]:
        """Plain values and tensors, for a journal."""
        return {"plan": self.plan.to_json(), "states": {query: dict(state) for query, state in self.states.items()}}

    @classmethod
    def from_plain(cls, value: Mapping[str, Any]) -> Merged:
        """Inverse of `to_plain`."""
        return cls(SharingPlan.from_json(value["plan"]), value["states"])


@dataclass(frozen=True)
class Reference:
    """What an original reaches on val, the truth it is judged by, and the score from which its detections count.

    `one_error` is the part of that score that one wrong answer can cost; `detections` is how many of a detector's
    count on some train frames (merger.bench.scores).
    """

    truths: Sequence[Truth]
    threshold: float
    score: float
    one_error: float
    detections: int = 0


class Workbench:
    """The originals of a workload, ready to be merged. Loading checks every weight file and decodes every frame.

    With `references`, found elsewhere, models and frames are loaded when they are asked for: a worker's jobs need few.
    `workers` and `threads` say who does jobs that don't depend on each other (merger.workers.jobs).
    """

    def __init__(
        self,
        workload: Workload,
        seed: int = 0,
        progress: Progress = silent,
        device: torch.device | None = None,
        references: Mapping[str, Reference] | None = None,
    ) -> None:
        self.workload, self.seed, self.progress = workload, seed, progress
        self.device = device or default_device()
        self.queries: dict[str, Query] = {query.id: query for query in workload.queries}
        self.layers: list[Layer] = layers_of_all(workload.queries)
        self.work = Work()
        self.precisions: Precisions | Settled | None = None
        self.workers: Workers | None = None
        self.threads = Threads(torch.get_num_threads(), torch.get_num_threads())
        self.originals: Mapping[str, nn.Module] = OnDemand(self.queries, self._original)
        self.test: Mapping[str, Prepared] = OnDemand(self.queries, partial(_decoded, name="test"))
        self.train = OnDemand(self.queries, lambda query: TrainingSet(query, _decoded(query, "train")))
        self.val: Mapping[str, Prepared] = OnDemand(self.queries, partial(_decoded, name="val"))
        self.references = references or {}
        if references is None:
            for part in (self.originals, self.test, self.train, self.val):
                list(part.values())
            self.references = {query.id: self._reference(query) for query in workload.queries}

    def models(
        self, queries: Iterable[str], states: Mapping[str, State] | None = None, plan: SharingPlan | None = None
    ) -> dict[str, nn.Module]:
        """Fresh copies of these queries' models, with the weights of `states` where given, else the originals'.

        They have the residuals of `plan`; those that `states` does not hold start without effect. Factors of `plan`
        stand in `states`.
        """
        made = {}
        for query in queries:
            model = made[query] = copy.deepcopy(self.originals[query]).requires_grad_(True)
            factorise(model, plan.low_rank.get(query, {}) if plan else {})
            for path, rank in (plan.residuals.get(query, {}) if plan else {}).items():
                attach(model.get_submodule(path), rank, self.seed)
            if states is not None and query in states:
                model.load_state_dict({**model.state_dict(), **states[query]})
        return made

    def asked(self, query: str, plan: SharingPlan) -> Query:
        """The query with the architecture that its model has under a plan: the arguments name its factors."""
        found = self.queries[query]
        return replace(found, model_args=with_ranks(found.model_args, plan.low_rank.get(query, {})))

    def tied(
        self,
        plan: SharingPlan,
        queries: Iterable[str],
        states: Mapping[str, State] | None = None,
        journal: Journal | None = None,
    ) -> dict[str, nn.Module]:
        """Fresh copies with the plan's sets tied and running statistics measured again, which a journal remembers."""
        models, journal = self.models(queries, states, plan), journal or Journal()
        tie(models, plan)
        for query, model in models.items():
            if any(q == query for members in plan.shared for q, _ in members):
                found = journal.step(f"norms of {query}", partial(self._calibrated, query, model))
                model.load_state_dict(found, strict=False)
        return models

    def calibrate(self, query: str, model: nn.Module, frames: int = CALIBRATION_FRAMES) -> None:
        """Measure the running statistics of the norms that are not at rest again, on so many train frames."""
        if all(map(at_rest, norms_of(model))):
            return
        data = self.train[query]
        count = min(len(data), frames)
        indices = torch.linspace(0, len(data) - 1, count).long().tolist()
        size = 32
        chunks = [indices[start : start + size] for start in range(0, count, size)]
        batches = (data.frames(chunk, self.device) for chunk in chunks)
        calibrate_norms(model, batches)
        self.work.add(self.queries[query], count)

    def _calibrated(self, query: str, model: nn.Module) -> State:
        """The model's buffers after `calibrate`."""
        self.calibrate(query, model)
        return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}

    def training(self, models: Mapping[str, nn.Module], recipe: Recipe, eased: Collection[str] = ()) -> Training:
        """A joint training of these models with the originals as teachers; those `eased` take fewer steps."""
        teachers = {query: self.originals[query] for query in models}
        return Training(models, self.train, recipe, self.work, teachers, self.settled(models), eased=eased)

    def settled(self, queries: Iterable[str]) -> dict[str, str]:
        """The precision in which each of these queries is trained; empty where a rule shall decide."""
        if self.precisions is None:
            return {}
        return {q: self.precisions.of(self.queries[q], self.originals[q], partial(self._few, q)) for q in queries}

    def _few(self, query: str) -> Tensor:
        data = self.train[query]
        return data.frames(range(min(FRAMES, len(data))))

    def match_scores(self, query: str, model: nn.Module) -> State:
        """Let a detector's score be reached as often as by its original; the biases that were moved."""
        if not isinstance(model, Detector):
            return {}
        reference, found, data = self.references[query], self.queries[query], self.train[query]
        moved, passes = match_scores(model, found, data, reference.threshold, reference.detections)
        self.work.add(found, passes)
        return moved

    def ratio(self, query: str, model: nn.Module) -> float:
        """The model's metric on val over its original's."""
        reference = self.references[query]
        found = self.queries[query]
        answers = predict(model, found, self.val[query])
        self.work.add(found, len(self.val[query]))
        reached = score(task_of(found.task), answers, reference.truths, found.classes, reference.threshold)
        return reached / reference.score if reference.score > 0 else 0.0

    def required(self, query: str, margin: float) -> float:
        """The ratio on val from which a query is accepted: `margin` of the way from its target to 1.

        Never so much that one error more than the original's would be too many where the target itself allows it.
        """
        target = self.queries[query].accuracy_target
        return max(target, min(target + margin * (1 - target), 1 - self.references[query].one_error))

    def evidence(self, query: str, model: nn.Module) -> Evidence:
        """Merged against original on test."""
        found = self.queries[query]
        before = predict(self.originals[query], found, self.test[query])
        after = predict(model, found, self.test[query])
        split = self.test[query].split
        return compare(found, split, before, after, self.references[query].threshold, self.seed)

    def _original(self, query: Query) -> nn.Module:
        if query.weights is None:
            raise InputError(self.workload.path, "no weights are named", "add `weights:`", f"queries.{query.id}")
        if not query.weights.exists():
            remedy = f"correct the path, or run `gemel train {_shown(self.workload.path)}`"
            raise InputError(str(query.weights), f"does not exist (query {query.id})", remedy, "weights")
        model = build_query(query)
        load_weights(query, model)
        return model.to(self.device, memory_format=torch.channels_last).eval().requires_grad_(False)  # type: ignore

    def _reference(self, query: Query) -> Reference:
        task, val = task_of(query.task), self.val[query.id]
        answers = predict(self.originals[query.id], query, val)
        labelled = val.split.truths
        threshold = task.choose_threshold(answers, labelled) if labelled is not None else query.min_score
        truths = truths_of(query, val.split, answers, threshold)
        reached = score(task, answers, truths, query.classes, threshold)
        needed = query.accuracy_target * reached  # the target is a ratio, so what it asks for depends on the original
        self.progress("reference", query=query.id, metric=task.metric, val=reached, needed=needed)
        if not worth_keeping(query, reached):
            text = f"{query.id}: its original reaches {reached:.2f} {task.metric} on val, which is no evidence"
            self.progress("warning", text=f"{text}; train it longer, or on more frames")
        units = len(set(val.split.units))
        if units < FEW_UNITS:
            what = "clip or track" if units == 1 else "clips or tracks"
            text = f"{query.id}: all of its val comes from {units} {what}; what holds there may not hold elsewhere"
            self.progress("warning", text=text)
        one_error = task.one_error(truths, query.classes) * (1 + ROUNDING) / reached if reached > 0 else 1.0
        found = 0
        if query.task == "detection":
            found = int((scores_of(self.originals[query.id], query, self.train[query.id]) >= threshold).sum())
        return Reference(truths, threshold, reached, one_error, found)


def _decoded(query: Query, name: str) -> Prepared:
    return Prepared(query, load_split(query, name)).load()


def snapshot(model: nn.Module) -> State:
    """A copy of a model's state."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def snapshots(models: Mapping[str, nn.Module]) -> dict[str, State]:
    """A copy of each model's state."""
    return {query: snapshot(model) for query, model in models.items()}


def _shown(path: Path) -> str:
    return path.name
