"""Everything a method works with: the originals, their frames, their scores, and how a merged model compares."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from merger.bench.merged import State
from merger.bench.scores import match_scores
from merger.bench.stock import OnDemand, Reference, Stock, judged
from merger.journal.progress import Progress, Stages, silent
from merger.journal.steps import Journal
from merger.training.loop import Recipe, Training, Work
from merger.training.precision import FRAMES, Precisions, Settled
from merger.workers.jobs import Threads, Workers
from models.detector import Detector
from models.measuring.evaluation import Evidence, compare, predict, sure_ratio, tallies_by_unit
from models.parts.low_rank import factorise
from models.parts.norms import at_rest, calibrate_norms, norms_of
from models.parts.residual import attach
from models.parts.terms import with_ranks
from models.sharing.plan import SharingPlan, tie
from models.tasks import task_of
from models.workload import Query, Workload

READING, JUDGING = "reading the models and frames", "judging the originals"
"""The stages of `open`."""
CALIBRATION_FRAMES = 256
CALIBRATION_BATCH = 32


class Workbench(Stock):
    """The originals of a workload, ready to be merged.

    `references` are what the originals reach on val; they are judged when asked for, unless they are known from
    elsewhere. `interval` says that merged models are judged by the lower end of one. `stages` are those of the merge.
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
        super().__init__(workload, device)
        self.interval = False
        self.seed, self.progress = seed, progress
        self.stages = Stages(progress)
        self.work = Work()
        self.precisions: Precisions | Settled | None = None
        self.workers: Workers | None = None
        self.threads = Threads(torch.get_num_threads(), torch.get_num_threads())
        self.references = OnDemand(self.queries, self._reference) if references is None else references

    def begin(self, stage: str, *, work: float | None = None, pieces: float | None = None) -> None:
        """The next stage of a merge, of so much `work` (image passes x FLOPs) or of so many `pieces` at most.

        How much of the work is done is told as it is counted, of pieces by `stages.add` or `stages.reach`.
        """
        before = self.work.total
        self.stages.begin(stage, pieces if work is None else work)
        self.work.told = (lambda: None) if work is None else lambda: self.stages.reach(self.work.total - before)

    def open(self) -> None:
        """Load and judge everything now, in two stages, so that bad input is found before any work."""
        self.begin(READING, pieces=self.pieces)
        self.load(self.stages.reach)
        self.begin(JUDGING, pieces=sum(map(len, self.val.values())))
        list(self.references.values())

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

    def calibrate(self, query: str, model: nn.Module, frames: int = CALIBRATION_FRAMES) -> bool:
        """Measure the running statistics of the norms that are not at rest again, on so many train frames.

        These go through the model in even chunks. One frame alone tells nothing of a spread: the norms stay. Returns
        whether there was anything to measure.
        """
        data = self.train[query]
        count = min(len(data), frames)
        if all(map(at_rest, norms_of(model))) or count < 2:
            return False
        indices = torch.linspace(0, len(data) - 1, count).long()
        chunks = indices.tensor_split(math.ceil(count / CALIBRATION_BATCH))
        calibrate_norms(model, (data.frames(chunk.tolist(), self.device) for chunk in chunks))
        self.work.add(self.queries[query], count)
        return True

    def training(self, models: Mapping[str, nn.Module], recipe: Recipe, eased: Collection[str] = ()) -> Training:
        """A joint training of these models with the originals as teachers; those `eased` take fewer steps."""
        teachers = {query: self.originals[query] for query in models}
        return Training(models, self.train, recipe, self.work, teachers, self.settled(models), eased=eased)

    def settled(self, queries: Iterable[str]) -> dict[str, str]:
        """The precision in which each of these queries is trained; empty where a rule shall decide."""
        if self.precisions is None:
            return {}
        return {q: self.precisions.of(self.queries[q], self.originals[q], partial(self._few, q)) for q in queries}

    def match_scores(self, query: str, model: nn.Module) -> State:
        """Let a detector's score be reached as often as by its original; the biases that were moved."""
        if not isinstance(model, Detector):
            return {}
        reference, found, data = self.references[query], self.queries[query], self.train[query]
        moved, passes = match_scores(model, found, data, reference.threshold, reference.detections)
        self.work.add(found, passes)
        return moved

    def ratio(self, query: str, model: nn.Module) -> float:
        """The model's metric on val over its original's; where `interval`, what it is above of this almost surely.

        One error more than the original's is not held against it.
        """
        reference, found = self.references[query], self.queries[query]
        self.work.of(found)  # counted here once, not where a prediction switches off what counting needs
        answers = predict(model, found, self.val[query], told=partial(self.work.add, found))
        task = task_of(found.task)
        tallies = tallies_by_unit(found, self.val[query].split, answers, reference.truths, reference.threshold)
        ratio = task.metric_of(tallies.sum(axis=0)) / reference.score if reference.score > 0 else 0.0
        if not self.interval or ratio >= 1 - reference.one_error:
            return ratio
        return sure_ratio(task, reference.tallies, tallies, reference.one_error)

    def required(self, query: str, margin: float | None = None) -> float:
        """The ratio on val from which a query is accepted: its target, or `margin` of the way from there to 1.

        Never so much that one error more than the original's would be too many where the target itself allows it.
        """
        target = self.queries[query].accuracy_target
        if margin is None:
            return target
        return max(target, min(target + margin * (1 - target), 1 - self.references[query].one_error))

    def evidence(self, query: str, model: nn.Module) -> Evidence:
        """Merged against original on test; the stage at work hears of every frame that either answered."""
        found, test, told = self.queries[query], self.test[query], self.stages.add
        before = predict(self.originals[query], found, test, told=told)
        after = predict(model, found, test, told=told)
        return compare(found, test.split, before, after, self.references[query].threshold, self.seed)

    def _calibrated(self, query: str, model: nn.Module) -> State:
        """The model's buffers after `calibrate`."""
        self.calibrate(query, model)
        return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}

    def _few(self, query: str) -> Tensor:
        data = self.train[query]
        return data.frames(range(min(FRAMES, len(data))))

    def _reference(self, query: Query) -> Reference:
        return judged(self, query, self.progress, self.stages.add)
