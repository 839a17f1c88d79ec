"""Training the originals: each query's own model, all layers free, until more training no longer helps."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from gemel.merger.checkpoint import WORK_SUFFIX, Checkpoint, Step, snapshot
from gemel.merger.events import Event
from gemel.merger.training.data import TrainingSet, default_device
from gemel.merger.training.loop import Diverged, Training
from gemel.merger.training.recipe import Flops, Recipe, check
from gemel.merger.training.step_config import MemoryPlan
from gemel.models.batchnorm import recalibrate_batchnorm, unfold_batchnorm
from gemel.models.data import PreparedFrames, load_split
from gemel.models.decoders.new_head import start_graph, trained_graph
from gemel.models.errors import InputError
from gemel.models.files.io import check_apart, hold_locks
from gemel.models.files.published import Published
from gemel.models.files.weights import fingerprint, load_matching, save_weights
from gemel.models.graph import Graph
from gemel.models.graph.onnx_writer import write_graph
from gemel.models.measures.evaluation import is_competent, predict, score
from gemel.models.notes import add_note
from gemel.models.stages import Progress, Stages, silent
from gemel.models.tasks import task_of
from gemel.models.workload import Query, Workload, inputs_of
from gemel.models.zoo import build_query, check_input
from gemel.models.zoo.user_models import is_model_file

START = "start.onnx"
"""In a training's work folder: the graph that it starts from."""


@dataclass(frozen=True)
class TrainOptions:
    """How originals are trained: annealed cycles until val gains less than `min_gain`, at most `max_cycles`.

    The first cycle shows the model about `passes` frames, in `min_epochs` to `max_epochs` epochs; each further one
    continues at half the rate and half as long. Once a cycle gains less, the mean of the weights at its end and at the
    end of the one before is kept (Izmailov et al., Averaging weights, UAI 2018) with BatchNorm recalibrated on
    `norm_batches` batches of `norm_batch` frames. Val decides when to stop, not which state is best: a best of many
    would be biased upwards, and merged models are compared with it. `unfold_batches` initialise the BatchNorm layers
    that folded weights (`init:`) left as identities.
    """

    rate: float = 1e-3
    batch: int = 16
    passes: int = 4000
    min_epochs: int = 4
    max_epochs: int = 25
    min_gain: float = 0.005
    max_cycles: int = 3
    norm_batches: int = 16
    norm_batch: int = 32
    unfold_batches: int = 4

    def __post_init__(self) -> None:
        for name in ("rate", "batch", "passes", "max_cycles"):
            check(name, getattr(self, name) > 0, getattr(self, name), "give a number above 0")

    def recipe(self, frames: int, cycle: int, seed: int) -> Recipe:
        """The recipe of one cycle over a train split of this many frames."""
        epochs = min(self.max_epochs, max(self.min_epochs, round(self.passes / frames)))
        if cycle:
            epochs = max(2, epochs // 2)
        rate = self.rate if cycle == 0 else self.rate / 2
        return Recipe(rate, epochs, self.batch, frames_per_epoch=frames, seed=seed + cycle)


@dataclass(frozen=True)
class TrainResult:
    """One trained original: its metric on val and test, and the seconds it took."""

    id: str
    metric: str
    val: float
    test: float
    seconds: float


def train_originals(
    workload: Workload,
    query_ids: Collection[str] | None = None,
    seed: int = 0,
    progress: Progress = silent,
    options: TrainOptions | None = None,
    resume: bool = False,
) -> list[TrainResult]:
    """Train the queries whose weights do not exist yet (or those named, again) and store their weights.

    Weights are written as soon as a query is trained. An interrupted training leaves `WEIGHTS.work`, from which
    `resume` continues to the same weights. A query whose model is an .onnx file starts from that of its `init:`, whose
    head is made new for the query's classes. Raises InputError when data or labels are missing, `weights:` names no
    .safetensors file, or that head is not understood.
    """
    options = options or TrainOptions()
    chosen = [workload.query(query) for query in query_ids] if query_ids else list(workload.queries)
    queries = [
        query
        for query in chosen
        if query_ids or _is_missing(query) or (resume and _work_folder(query.weights).exists())
    ]
    starts = [_check_trainable(workload, query) for query in queries]
    trained = [query if start is None else _with_start(query) for query, start in zip(queries, starts, strict=True)]
    weights = [query.weights for query in queries if isinstance(query.weights, Path)]
    outputs = [("weights", path) for path in (*weights, *map(_work_folder, weights))]
    check_apart(outputs, inputs_of(workload, {query.id for query in queries}), workload.path)
    order = {query.id: index for index, query in enumerate(workload.queries)}
    runs = [
        _OriginalTraining(workload, query, start, path, seed * len(order) + order[query.id], options, progress)
        for query, start, path in zip(trained, starts, weights, strict=True)
    ]
    results, stages = [], Stages(progress)
    with hold_locks(*weights):
        for run in runs:  # all bad input is found before anything trains
            run.open_checkpoint(resume)
        if runs:
            stages.announce([run.stage for run in runs])
        for index, run in enumerate(runs):
            progress(Event.QUERY.value, query=run.query.id, index=index + 1, count=len(runs))
            results.append(run.train(run.open_checkpoint(resume), stages))
    return results


def _is_missing(query: Query) -> bool:
    return query.weights is None or not query.weights.exists()


def _work_folder(weights: Path | Published | None) -> Path:
    return Path(f"{weights}{WORK_SUFFIX}")


def _with_start(query: Query) -> Query:
    """The query whose model is the file, in the work folder, that its training starts from."""
    path = _work_folder(query.weights) / START
    return replace(query, model=str(path), weights=path)


def _check_trainable(workload: Workload, query: Query) -> Graph | None:
    """The graph that training starts from, where the model is a file; InputError where it cannot be trained."""
    is_file = is_model_file(query.model)
    suffix = ".onnx" if is_file else ".safetensors"
    if not isinstance(query.weights, Path) or query.weights.suffix != suffix:
        key = "model" if is_file else "weights"
        hint = f"name the {suffix} file that training shall write"
        raise InputError(workload.path, f"query {query.id} has no such `{key}:`", hint, key)
    if is_file and not (isinstance(query.init, Path) and is_model_file(str(query.init))):
        hint = "name the .onnx file that training starts from"
        raise InputError(workload.path, f"query {query.id} has no such `init:`", hint, "init")
    if load_split(query, "train").labels is None:
        raise InputError(workload.path, f"query {query.id} has no labels to train on", "label its data", "data")
    return start_graph(query) if is_file else None


@dataclass(frozen=True)
class _OriginalTraining:
    """The training of one query's original; `start` is the content of the model's file, if that is one."""

    workload: Workload
    query: Query
    start: Graph | None
    output: Path
    seed: int
    options: TrainOptions
    progress: Progress

    @property
    def stage(self) -> str:
        return f"training the model of {self.query.id}"

    def open_checkpoint(self, resume: bool) -> Checkpoint:
        """The query's checkpoint; InputError for one of other options, or without `resume`."""
        files = (fingerprint(self.workload.path) + fingerprint(self.query.init)).hex()
        identity = {"workload": files, "query": self.query.id, "seed": self.seed, **asdict(self.options)}
        return Checkpoint(_work_folder(self.output), identity, resume, what="training")

    def train(self, checkpoint: Checkpoint, stages: Stages) -> TrainResult:
        started, query, options = time.monotonic() - checkpoint.seconds, self.query, self.options
        if self.start is not None:
            Path(query.model).parent.mkdir(parents=True, exist_ok=True)
            write_graph(query.model, self.start)
        splits = {name: PreparedFrames(query, load_split(query, name)).load() for name in ("train", "val", "test")}
        data, model = TrainingSet(query, splits["train"]), self._build(splits["train"])
        recipes = [options.recipe(len(data), cycle, self.seed) for cycle in range(options.max_cycles)]
        memory = MemoryPlan(checkpoint.state(Step.MEMORY))
        stages.begin(self.stage, sum(recipe.epochs for recipe in recipes), is_bound=len(recipes) > 1)
        now = checkpoint.state(Step.PROGRESS)  # of the last finished cycle
        while now.get("done", 0) < len(recipes) and not now.get("ended"):
            cycle, before = now.get("done", 0), now.get("val", -math.inf)
            if cycle:
                model.load_state_dict(now["state"])
            mean = AveragedModel(model)
            mean.update_parameters(model)
            training = Training({query.id: model}, {query.id: data}, recipes[cycle], Flops(), memory=memory)
            checkpoint.training(training, str(cycle + 1))
            epochs_before = sum(recipe.epochs for recipe in recipes[:cycle])

            def report_step(training: Training = training, done: int = epochs_before) -> None:
                stages.reach(done + training.step / training.steps)
                checkpoint.maybe_save()

            training.after_step = report_step
            self._train_cycle(training, cycle, checkpoint)
            val, threshold = self._evaluate(model, splits["val"])
            self.progress(Event.CYCLE.value, query=query.id, cycle=cycle + 1, cycles=options.max_cycles, val=val)
            if ended := val - before < options.min_gain:
                mean.update_parameters(model)
                model = mean.module
                recalibrate_batchnorm(model, self._augmented_batches(data))
                val, threshold = self._evaluate(model, splits["val"])
            checkpoint.discard(Step.TRAINING, str(cycle + 1))
            now.update(done=cycle + 1, val=val, threshold=threshold, state=snapshot(model), ended=ended)
        model.load_state_dict(now["state"])
        test, _ = self._evaluate(model, splits["test"], now["threshold"])
        if self.start is None:
            save_weights(self.output, now["state"], classes=query.classes)
        else:
            write_graph(self.output, trained_graph(model, self.start))
            Path(query.model).unlink()
        checkpoint.remove()
        seconds, metric = time.monotonic() - started, task_of(query).metric
        result = TrainResult(query.id, metric, now["val"], test, seconds)
        self.progress(Event.ORIGINAL.value, query=query.id, metric=metric, val=now["val"], test=test, seconds=seconds)
        if not is_competent(query, test):
            text = f"{test:.2f} {metric} on test is too little to be evidence for anything"
            hint = f"lower --rate (now {options.rate:g}), or raise --passes or --cycles"
            add_note(query.id, text, hint)
        return result

    def _build(self, frames: PreparedFrames) -> nn.Module:
        """The model with random weights, or those of `init:`, whose folded BatchNorm layers start from the data."""
        torch.manual_seed(self.seed)
        model = build_query(self.query)
        check_input(self.query, model)
        model = model.to(default_device(), memory_format=torch.channels_last)  # type: ignore[call-overload]
        if self.query.init is not None:
            if self.start is None:
                load_matching(model, self.query.init)
            data, size = TrainingSet(self.query, frames), self.options.norm_batch
            indices = data.spread(self.options.unfold_batches * size)
            chunks = [indices[start : start + size] for start in range(0, len(indices), size)]
            unfold_batchnorm(model, [data.frames(chunk, default_device()) for chunk in chunks])
        return model

    def _train_cycle(self, training: Training, cycle: int, checkpoint: Checkpoint) -> None:
        recipe, query = training.recipe, self.query.id
        while training.epochs < recipe.epochs:
            try:
                loss = training.epoch()
            except Diverged as error:
                checkpoint.remove()
                hint = f"lower the rate with --rate (now {recipe.rate})"
                raise InputError(query, "training diverged", hint) from error
            epoch = training.epochs
            self.progress(
                Event.EPOCH.value, queries=[query], epoch=epoch, epochs=recipe.epochs, cycle=cycle + 1, loss=loss
            )

    def _evaluate(
        self, model: nn.Module, prepared: PreparedFrames, threshold: float | None = None
    ) -> tuple[float, float]:
        """The metric and its score threshold, which is chosen on these frames when none is given."""
        query, task, labels = self.query, task_of(self.query), prepared.split.labels
        if labels is None:
            raise InputError(query.id, f"the split '{prepared.split.name}' has no labels", "label it", "data")
        predictions = predict(model, query, prepared)
        if threshold is None:
            threshold = task.choose_threshold(predictions, labels)
        return score(task, predictions, labels, query.classes, threshold), threshold

    def _augmented_batches(self, data: TrainingSet) -> Iterator[Tensor]:
        """Train frames augmented as in training, for BatchNorm recalibration."""
        generator = torch.Generator().manual_seed(self.seed)
        count, size = self.options.norm_batches * self.options.norm_batch, self.options.norm_batch
        for chunk in torch.randperm(count, generator=generator).split(size):
            images, _ = data.batch((chunk * len(data) // count).tolist(), generator)
            yield data.model_input(images, default_device())
