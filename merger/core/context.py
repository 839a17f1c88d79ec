"""Everything a method works with: the originals, their frames, their scores, and how a merged model compares."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from merger.checkpoint import State, StepCache
from merger.core.inputs import LazyDict, MergeInputs, Reference, evaluated
from merger.core.scores import match_scores
from merger.distributed import ProcessGroup
from merger.events import Progress, Stages, silent
from merger.training.loop import Training
from merger.training.recipe import Flops, Recipe
from merger.training.step_config import MemoryPlan
from models.batchnorm import batchnorms_of, is_frozen, recalibrate_batchnorm
from models.detector import Detector
from models.device import retry_with_smaller_batch
from models.evaluation import Evidence, compare, lower_bound_ratio, predict, tallies_by_unit
from models.sharing.plan import SharingPlan, tie
from models.tasks import task_of
from models.workload import Query, Workload

T = TypeVar("T")
READING, EVALUATING = "reading the models and frames", "judging the originals"
"""The stages of `open`."""
CALIBRATION_FRAMES = 512
"""With half as many the statistics of an original itself answer differently from one draw of frames to the other."""
CALIBRATION_BATCH = 32
MIN_CALIBRATED = 4
"""Frames at once below which statistics would say little, however full the memory is."""


class MergeContext(MergeInputs):
    """The originals of a workload, ready to be merged.

    `references` are what the originals reach on val; they are judged when asked for, unless they are known from
    elsewhere. `interval` says that merged models are judged by the lower end of one. `stages` are those of the merge.
    `group` are the processes of the merge (merger.distributed).
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
        super().__init__(workload, device, group)
        self.interval = False
        self.seed, self.progress = seed, progress
        self.stages = Stages(progress)
        self.flops = Flops()
        self.precision = "fp32"
        self.memory = MemoryPlan(progress=progress)
        self.references = LazyDict(self.queries, self._reference) if references is None else references

    def begin(self, stage: str, *, flops: float | None = None, pieces: float | None = None) -> None:
        """The next stage of a merge, of so much `work` (image passes x FLOPs) or of so many `pieces` at most.

        How much of the work is done is told as it is counted, of pieces by `stages.add` or `stages.reach`.
        """
        before = self.flops.total
        self.stages.begin(stage, pieces if flops is None else flops)
        self.flops.on_change = (lambda: None) if flops is None else lambda: self.stages.reach(self.flops.total - before)

    def open(self) -> None:
        """Load and judge everything now, in two stages, so that bad input is found before any work."""
        self.begin(READING, pieces=self.pieces)
        self.group.all_gather_object(partial(self.load, self.stages.reach))
        self.begin(EVALUATING, pieces=sum(map(len, self.val.values())))
        mine = self.group.own(self.queries)
        found = self.gather(lambda: {query: self.references[query] for query in mine})
        self.references = {query: found[query] for query in self.queries}

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
        before, progress, events = self.flops.total, self.progress, list[tuple[str, dict[str, Any]]]()
        if self.group.rank:
            self.progress = lambda event, **fields: events.append((event, fields))
        try:
            rows = self.group.all_gather_object(lambda: (dict(compute()), self.flops.total - before, events))
        finally:
            self.progress = progress
        self.flops.total = before + sum(flops for _, flops, _ in rows)
        for event, fields in [one for _, _, own in rows for one in own]:
            self.progress(event, **fields)
        return {name: value for found, *_ in rows for name, value in sorted(found.items())}

    def models(
        self, queries: Iterable[str], states: Mapping[str, State] | None = None, plan: SharingPlan | None = None
    ) -> dict[str, nn.Module]:
        """Fresh copies of these queries' models, with the weights of `states` or the originals'."""
        made = {}
        for query in queries:
            model = made[query] = copy.deepcopy(self.originals[query]).requires_grad_(True)
            if states is not None and query in states:
                model.load_state_dict({**model.state_dict(), **states[query]})
        return made

    def tied(
        self,
        plan: SharingPlan,
        queries: Iterable[str],
        states: Mapping[str, State] | None = None,
        journal: StepCache | None = None,
    ) -> dict[str, nn.Module]:
        """Fresh copies with the plan's sets tied and running statistics measured again, which a journal remembers."""
        models, journal = self.models(queries, states, plan), journal or StepCache()
        tie(models, plan)
        for query, model in models.items():
            if any(q == query for members in plan.shared for q, _ in members):
                found = journal.step(f"norms of {query}", partial(self._calibrated, query, model))
                model.load_state_dict(found, strict=False)
        return models

    def calibrate(self, query: str, model: nn.Module, frames: int = CALIBRATION_FRAMES) -> bool:
        """Measure the running statistics of the norms that are not at rest again, on so many train frames, augmented
        as in training: that is what an original's are an average of.

        These go through the model in even chunks, mixed: frames that follow each other show one clip or one class, and
        the mean of what such chunks spread is less than they spread together. One frame alone tells nothing of a
        spread: the norms stay. Returns whether there was anything to measure.
        """
        data = self.train[query]
        count = min(len(data), frames)
        if all(map(is_frozen, batchnorms_of(model))) or count < 2:
            return False
        mixed = torch.randperm(count, generator=torch.Generator().manual_seed(0))
        indices = torch.linspace(0, len(data) - 1, count).long()[mixed]

        def measured(most: int) -> None:
            draws = torch.Generator().manual_seed(0)
            chunks = indices.tensor_split(math.ceil(count / most))
            recalibrate_batchnorm(
                model, (data.model_input(data.batch(one.tolist(), draws)[0], self.device) for one in chunks)
            )

        retry_with_smaller_batch(min(CALIBRATION_BATCH, count), measured, MIN_CALIBRATED)
        self.flops.add(self.queries[query], count)
        return True

    def training(self, models: Mapping[str, nn.Module], recipe: Recipe, subsampled: Collection[str] = ()) -> Training:
        """A joint training of these models with the originals as teachers, spread over the ranks of the group."""
        teachers = {query: self.originals[query] for query in models}
        return Training(
            models, self.train, recipe, self.flops, teachers,
            precision=self.precision, subsampled=subsampled, memory=self.memory, group=self.group,
        )  # fmt: skip

    def match_scores(self, query: str, model: nn.Module) -> State:
        """Let a detector's score be reached as often as by its original; the biases that were moved."""
        if not isinstance(model, Detector):
            return {}
        reference, found, data = self.references[query], self.queries[query], self.train[query]
        moved, passes = match_scores(model, found, data, reference.threshold, reference.detections)
        self.flops.add(found, passes)
        return moved

    def ratio(self, query: str, model: nn.Module) -> float:
        """The model's metric on val over its original's; where `interval`, what it is above of this almost surely.

        One error more than the original's is not held against it.
        """
        reference, found = self.references[query], self.queries[query]
        self.flops.of(found)  # counted here once, not where a prediction switches off what counting needs
        answers = predict(model, found, self.val[query], progress=partial(self.flops.add, found))
        task = task_of(found.task)
        tallies = tallies_by_unit(found, self.val[query].split, answers, reference.truths, reference.threshold)
        ratio = task.metric_of(tallies.sum(axis=0)) / reference.score if reference.score > 0 else 0.0
        if not self.interval or ratio >= 1 - reference.one_error:
            return ratio
        return lower_bound_ratio(task, reference.tallies, tallies, reference.one_error)

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
        before = predict(self.originals[query], found, test, progress=told)
        after = predict(model, found, test, progress=told)
        return compare(found, test.split, before, after, self.references[query].threshold, self.seed)

    def _calibrated(self, query: str, model: nn.Module) -> State:
        """The model's buffers after `calibrate`."""
        self.calibrate(query, model)
        return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}

    def _reference(self, query: Query) -> Reference:
        return evaluated(self, query, self.progress, self.stages.add)
