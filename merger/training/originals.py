"""Training the originals: each query's own model, every layer free, until more training no longer helps."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from merger.checkpoint import WORK_SUFFIX, Checkpoint, snapshot
from merger.events import Progress, Stages, silent
from merger.training.loop import Diverged, Training, TrainingSet
from merger.training.recipe import Flops, Recipe, check, default_device
from merger.training.step_config import MemoryPlan, StepConfig, first_that_fits, layouts
from models.batchnorm import recalibrate_batchnorm, unfold_batchnorm
from models.data import PreparedFrames, load_split
from models.errors import InputError
from models.evaluation import is_competent, predict, score
from models.io import check_apart, locked
from models.tasks import task_of
from models.weights import fingerprint, load_matching, save_weights
from models.workload import Query, Workload, inputs_of
from models.zoo import build_query, check_input

UNFOLDING_BATCHES = 4
NORM_BATCHES = 16
NORM_BATCH = 32


@dataclass(frozen=True)
class TrainOptions:
    """How originals are trained: annealed cycles until val gains less than `enough`, at most `max_cycles`.

    The first cycle shows the model about `passes` frames, in `min_epochs` to `max_epochs` epochs; each further one
    goes on from there, at half the rate and half as long. Once a cycle gains nothing, the mean of the weights at its
    end and at the end of the one before is kept (Izmailov et al., Averaging weights, UAI 2018), its norms measured
    again; where the last cycle still gained, its end. Val says when to stop, not which state is best: what is merged
    is held against the original on val, and the best of many states has better luck there than anywhere else.
    """

    rate: float = 1e-3
    batch: int = 16
    passes: int = 4000
    min_epochs: int = 4
    max_epochs: int = 25
    enough: float = 0.005
    max_cycles: int = 3

    def __post_init__(self) -> None:
        for name in ("rate", "batch", "passes", "max_cycles"):
            check(name, getattr(self, name) > 0, getattr(self, name), "give a number above 0")

    def recipe(self, frames: int, cycle: int, seed: int) -> Recipe:
        """The recipe of one cycle over a train split of so many frames."""
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

    Each query's weights are written as soon as it is trained. An interrupted training leaves `WEIGHTS.work`, from which
    `resume` goes on, and comes to the same weights. Raises InputError where data or labels are missing, or no
    `weights:` says where to put the result.
    """
    options = options or TrainOptions()
    chosen = [workload.query(query) for query in query_ids] if query_ids else list(workload.queries)
    waiting = [query for query in chosen if query_ids or _is_missing(query) or (resume and _work(query).exists())]
    for query in waiting:
        if not isinstance(query.weights, Path) or query.weights.suffix != ".safetensors":
            remedy = "name the .safetensors file that training shall write"
            raise InputError(workload.path, f"query {query.id} has no such `weights:`", remedy, "weights")
        if load_split(query, "train").labels is None:
            raise InputError(workload.path, f"query {query.id} has no labels to train on", "label its data", "data")
    weights = [query.weights for query in waiting if isinstance(query.weights, Path)]
    outputs = [("weights", path) for path in (*weights, *map(_work, waiting))]
    check_apart(outputs, inputs_of(workload, {query.id for query in waiting}), workload.path)
    results, stages, order = [], Stages(progress), {query.id: at for at, query in enumerate(workload.queries)}
    seeds = {query.id: seed * len(workload.queries) + order[query.id] for query in waiting}
    with locked(*weights):
        for query in waiting:  # what is refused is refused before anything trains
            _kept(workload, query, seeds[query.id], options, resume)
        if waiting:
            stages.announce([_stage(query) for query in waiting])
        for index, query in enumerate(waiting):
            progress("query", query=query.id, index=index + 1, count=len(waiting))
            checkpoint = _kept(workload, query, seeds[query.id], options, resume)
            results.append(_train(query, seeds[query.id], progress, options, stages, checkpoint))
    return results


def _is_missing(query: Query) -> bool:
    return query.weights is None or not query.weights.exists()


def _work(query: Query) -> Path:
    """The folder in which a query's training is kept."""
    return Path(f"{query.weights}{WORK_SUFFIX}")


def _kept(workload: Workload, query: Query, seed: int, options: TrainOptions, resume: bool) -> Checkpoint:
    """What is kept of a training; InputError where one of other options was interrupted, or it is not to go on."""
    begins = (fingerprint(workload.path) + fingerprint(query.init)).hex()
    identity = {"workload": begins, "query": query.id, "seed": seed, **asdict(options)}
    return Checkpoint(_work(query), identity, resume, what="training")


def _stage(query: Query) -> str:
    return f"training the model of {query.id}"


def _train(
    query: Query, seed: int, progress: Progress, options: TrainOptions, stages: Stages, checkpoint: Checkpoint
) -> TrainResult:
    started = time.monotonic() - checkpoint.seconds
    splits = {name: PreparedFrames(query, load_split(query, name)).load() for name in ("train", "val", "test")}
    data = TrainingSet(query, splits["train"])
    torch.manual_seed(seed)
    model = build_query(query)
    check_input(query, model)
    model = model.to(default_device(), memory_format=torch.channels_last)  # type: ignore[call-overload]
    if query.init is not None:
        load_matching(model, query.init)
        _unfold(model, data)
    recipes = [options.recipe(len(data), cycle, seed) for cycle in range(options.max_cycles)]
    fitting = MemoryPlan(checkpoint.state("fitting"), progress)
    recipes = _laid_out(query, model, data, recipes, fitting)
    stages.begin(_stage(query), sum(recipe.epochs for recipe in recipes))
    now = checkpoint.state("cycles")  # what the last one came to
    while now.get("done", 0) < len(recipes) and not now.get("ended"):
        cycle, before = now.get("done", 0), now.get("val", -math.inf)
        if cycle:
            model.load_state_dict(now["state"])
        mean, epochs = _mean_with(model), sum(one.epochs for one in recipes[:cycle])
        training = Training({query.id: model}, {query.id: data}, fitting.recipe(recipes[cycle]), Flops())
        training.fitting = fitting
        checkpoint.training(f"cycle {cycle + 1}", training)
        training.after_step = partial(_reach, stages, training, epochs, checkpoint)
        _cycle(query, training, progress, cycle, checkpoint)
        val, threshold = _evaluate(query, model, splits["val"])
        progress("cycle", query=query.id, cycle=cycle + 1, cycles=options.max_cycles, val=val)
        if ended := val - before < options.enough:
            mean.update_parameters(model)
            model = mean.module
            recalibrate_batchnorm(model, _as_trained_on(data, seed))
            val, threshold = _evaluate(query, model, splits["val"])
        checkpoint.discard(f"cycle {cycle + 1}")
        now.update(done=cycle + 1, val=val, threshold=threshold, state=snapshot(model), ended=ended)
    model.load_state_dict(now["state"])
    test, _ = _evaluate(query, model, splits["test"], now["threshold"])
    assert isinstance(query.weights, Path)
    save_weights(query.weights, now["state"], classes=query.classes)
    checkpoint.remove()
    seconds, val = time.monotonic() - started, now["val"]
    metric = task_of(query.task).metric
    progress("original", query=query.id, metric=metric, val=val, test=test, seconds=seconds)
    if not is_competent(query, test):
        text = f"{query.id}: {test:.2f} {metric} on test is too little to be evidence for anything"
        progress("warning", text=f"{text}; lower --rate (now {options.rate:g}), or raise --passes or --cycles")
    return TrainResult(query.id, metric, val, test, seconds)


def _laid_out(
    query: Query, model: nn.Module, data: TrainingSet, recipes: Sequence[Recipe], fitting: MemoryPlan
) -> list[Recipe]:
    """The recipes as they fit a card, where that is trained on; some steps of a copy are tried."""
    device, known = default_device(), fitting.layout
    if device.type == "cpu":
        return list(recipes)

    def attempt(layout: StepConfig) -> bool:
        if not layout.place([data.prepared], device):
            return False
        trial = Training({query.id: copy.deepcopy(model)}, {query.id: data}, layout.trial(recipes[0]), Flops())
        with suppress(Diverged):
            trial.epoch()
        return True

    possible = layouts(recipes[0]) if known is None else [known]
    chosen = possible[first_that_fits(possible, attempt)]
    fitting.take(chosen)
    return [chosen.recipe(recipe) for recipe in recipes]


def _mean_with(model: nn.Module) -> AveragedModel:
    """A mean of weights that begins with the model's as they are now."""
    mean = AveragedModel(model)
    mean.update_parameters(model)
    return mean


def _reach(stages: Stages, training: Training, epochs_before: int, checkpoint: Checkpoint) -> None:
    """Keep what was done, and tell how much that is, in epochs, of those that training takes at most."""
    stages.reach(epochs_before + training.step / training.steps)
    checkpoint.maybe_save()


def _cycle(query: Query, training: Training, progress: Progress, cycle: int, checkpoint: Checkpoint) -> None:
    """Train the model for one annealed cycle, or for what is left of it."""
    recipe = training.recipe
    while training.epochs < recipe.epochs:
        try:
            loss = training.epoch()
        except Diverged as error:
            checkpoint.remove()
            remedy = f"lower the rate with --rate (now {recipe.rate})"
            raise InputError(query.id, "training diverged", remedy) from error
        progress("epoch", queries=[query.id], epoch=training.epochs, epochs=recipe.epochs, cycle=cycle + 1, loss=loss)


def _evaluate(
    query: Query, model: nn.Module, prepared: PreparedFrames, threshold: float | None = None
) -> tuple[float, float]:
    """The metric and the score threshold it holds for, chosen on these frames where none is given."""
    task, truths = task_of(query.task), prepared.split.labels
    if truths is None:
        raise InputError(query.id, f"the split '{prepared.split.name}' has no labels", "label it", "data")
    answers = predict(model, query, prepared)
    if threshold is None:
        threshold = task.choose_threshold(answers, truths)
    return score(task, answers, truths, query.classes, threshold), threshold


def _unfold(model: nn.Module, data: TrainingSet) -> None:
    """Make norms that start as identities agree with the data, so that training starts from what was loaded."""
    indices = data.spread(UNFOLDING_BATCHES * NORM_BATCH)
    chunks = [indices[start : start + NORM_BATCH] for start in range(0, len(indices), NORM_BATCH)]
    unfold_batchnorm(model, [data.frames(chunk, default_device()) for chunk in chunks])


def _as_trained_on(data: TrainingSet, seed: int) -> Iterator[Tensor]:
    """Some batches of train frames, augmented as in training: what running statistics are an average of."""
    generator = torch.Generator().manual_seed(seed)
    for chunk in torch.randperm(NORM_BATCHES * NORM_BATCH, generator=generator).split(NORM_BATCH):
        images, _ = data.batch((chunk * len(data) // (NORM_BATCHES * NORM_BATCH)).tolist(), generator)
        yield data.fed(images, default_device())
