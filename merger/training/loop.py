"""The one training loop: originals alone and merged models together, with labels, distillation, or both."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map

from merger.training.data import DROPOUT_MODULES, Batches, MicroBatch, RandomStream
from merger.training.distillation import feature_loss, record_inputs, watched_layers
from merger.training.precision import autocast, by_rule, multiplying
from merger.training.recipe import Flops, Recipe, default_device
from merger.training.step_config import MemoryPlan, StepConfig, StepRollback, recomputed
from merger.training.teacher_cache import TeacherCache, cache_capacities, teacher_output_bytes
from models.batchnorm import batchnorms_of, is_frozen
from models.data import PreparedFrames
from models.device import empty_caches, is_out_of_memory
from models.process import keep_freed_memory
from models.tasks import task_of
from models.workload import Query
from models.zoo import preprocess_of

MAX_GRADIENT_NORM = 10.0
WARM_UP = 0.1
MIN_MOMENTUM = 0.1
"""The part of their momentum that norms have at the end: of ten batches alone their averages wander (lab notes)."""
EPSILON = 1e-6
"""AdamW's; at its usual 1e-8 a gradient that is nothing but rounding becomes a step of full size, and which way it
points would depend on the machine."""


class Diverged(Exception):
    """The loss is not a number any more."""


class TrainingSet:
    """The train split of one query, batch by batch, augmented by its task."""

    def __init__(self, query: Query, prepared: PreparedFrames) -> None:
        self.query, self.prepared = query, prepared
        self.task = task_of(query.task)
        self.preprocess = preprocess_of(query.model, query.input_size)
        self._bytes: dict[bool, int | None] = {}

    @property
    def unchanged(self) -> bool:
        """Whether its frames are the same at every visit: without labels, as nobody knows what would go with others."""
        return self.prepared.split.labels is None

    def teacher_output_bytes(self, features: bool) -> int | None:
        """See `merger.training.teacher_cache.teacher_output_bytes`, of this query's original."""
        if features not in self._bytes:
            self._bytes[features] = teacher_output_bytes(self.query, features)
        return self._bytes[features]

    @cached_property
    def targets(self) -> list | None:
        """What each frame's answer should be, None without labels; frames not yet decoded are, for their sizes."""
        truths, every = self.prepared.split.labels, range(len(self.prepared))
        return None if truths is None else self.task.targets(truths, self.prepared.sizes(every), self.query.classes)

    def __len__(self) -> int:
        return len(self.prepared)

    def spread(self, count: int) -> list[int]:
        """The indices of so many frames, or of all, spread evenly over the split."""
        count = min(count, len(self))
        return [int((place + 0.5) * len(self) / count) for place in range(count)]

    def frames(self, indices: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
        """Normalised float32 frames (N, 3, S, S) as they are, on this device."""
        return self.preprocess.normalise(self.prepared.batch(indices).to(device))

    def batch(self, indices: list[int], generator: torch.Generator) -> tuple[Tensor, list | None]:
        """uint8 frames (N, 3, S, S), where they lie, and their targets (None without labels: as they are, then)."""
        images = self.prepared.batch(indices)
        if self.targets is None:
            return images, None
        return self.task.augment(images, [self.targets[index] for index in indices], generator)

    def fed(self, images: Tensor, device: torch.device) -> Tensor:
        """Such frames as a model on this device is fed: normalised float32."""
        return self.preprocess.normalise(images.to(device, non_blocking=True))


class Training:
    """Trains some models together, step by step; parameters that models share stand once in the optimiser.

    A step is a function of its number, the models and the optimiser alone, so `state_dict` is all there is to keep;
    `after_step` is called after each. `precisions` are fp32, tf32 or bf16 per query; a rule decides for others.
    Queries that are `eased` take part in half of the steps, or fewer: in an epoch they see no frame twice. They can
    become others between two epochs. What originals answer to frames that come as they are is kept
    (`merger.training.teacher_cache`). With `fitting` a step for which memory is not enough is taken again, laid out for less.
    Norms whose parameters are all frozen stay in eval mode, and so does dropout where there is a teacher. There the
    momentum of norms falls with the rate, too: the slower weights move, the more batches their averages are of.

    `merger.training.spread` trains models that lie in several processes: `everyone` are the queries of all of these.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        sets: Mapping[str, TrainingSet],
        recipe: Recipe,
        flops: Flops,
        teachers: Mapping[str, nn.Module] | None = None,
        precisions: Mapping[str, str] | None = None,
        eased: Collection[str] = (),
    ) -> None:
        keep_freed_memory()
        self.models, self.sets, self.recipe, self.flops = models, sets, recipe, flops
        self.teachers = teachers or {}
        self.everyone = self._everyone()
        self.device = next((p.device for model in models.values() for p in model.parameters()), default_device())
        self.precisions = {q: (precisions or {}).get(q) or by_rule(m, self.device) for q, m in models.items()}
        self.steps = math.ceil(max(self._contributions(()).values()) / recipe.batch)
        self.optimiser = torch.optim.AdamW(self._parameter_groups(), lr=recipe.rate, eps=EPSILON, fused=True)
        self.after_step: Callable[[], None] = lambda: None
        self.fitting: MemoryPlan | None = None
        self._undo = StepRollback(models.values())
        self.step = 0
        self._losses, self._summed = 0.0, 0
        every = {query: sets[query] for query in self.everyone}
        self._batches = Batches(every, recipe.batch, recipe.node, self.steps * recipe.epochs, recipe.seed)
        self._batches.prepares = models.keys()
        self._batches.pins = self.device.type == "cuda"
        self.ease(eased)
        watched = recipe.features > 0 and self.teachers
        self._watched = {q: watched_layers(sets[q].query, m) if watched else [] for q, m in models.items()}
        rooms = cache_capacities(every, recipe) if self._taught() else {}
        self._answers = {query: TeacherCache(room) for query, room in rooms.items()}
        taught = [model for query, model in models.items() if query in self.teachers]
        self._momenta = {norm: norm.momentum for model in taught for norm in batchnorms_of(model) if norm.momentum}

    @property
    def epochs(self) -> int:
        """Epochs finished."""
        return self.step // self.steps

    @property
    def loss(self) -> float:
        """Mean loss of the epoch at work, or of the one just finished."""
        return self._losses / max(1, self._summed)

    def ease(self, eased: Collection[str]) -> None:
        """From the next step on these are eased, and no others."""
        self.eased = sorted(eased)
        counts = self._contributions(eased)
        steps = {query: math.ceil(count / self.recipe.batch) for query, count in counts.items()}
        self._batches.share({query: Fraction(count, self.steps) for query, count in steps.items()})

    def epoch(self) -> float:
        """Go on to the end of an epoch; returns its mean loss. Raises Diverged when a loss is not finite."""
        for query, model in self.models.items():
            model.train()
            _rest_frozen_norms(model)
            if query in self.teachers:
                _rest_random_parts(model)
        end = (self.epochs + 1) * self.steps
        while self.step < end:
            self._take_step()
            self.after_step()
        self._keep_momenta(1.0)
        return self.loss

    def state_dict(self) -> dict[str, Any]:
        """Everything that a later step depends on; tensors are those at work, not copies."""
        models = {query: model.state_dict() for query, model in self.models.items()}
        moments = {name: self.optimiser.state.get(p, {}) for name, p in self._named_parameters()}
        losses, taught = [self._losses, self._summed], {query: list(one.known) for query, one in self._answers.items()}
        return {
            "step": self.step, "losses": losses, "models": models, "moments": moments, "eased": self.eased,
            "taught": taught, "layout": [self.recipe.node, self.recipe.recompute],
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` of the same training returned."""
        self.step, (self._losses, self._summed) = state["step"], state["losses"]
        for query, model in self.models.items():
            model.load_state_dict(state["models"][query])
        known = {p: state["moments"][name] for name, p in self._named_parameters() if state["moments"][name]}
        self.optimiser.state.clear()
        for p, moments in known.items():
            self.optimiser.state[p] = {name: value.to(p.device) for name, value in moments.items()}
        self.ease(state["eased"])
        for query, answers in self._answers.items():
            answers.known = dict.fromkeys(state["taught"][query])
        self._lay_out(*state["layout"])

    def _everyone(self) -> list[str]:
        """The queries that train together."""
        return list(self.models)

    def _taught(self) -> bool:
        """Whether originals teach."""
        return bool(self.teachers)

    def _shared(self) -> tuple[set[int], bool]:
        """The parameters here that several models train, by their ids; and whether there are any anywhere."""
        users = Counter(key for model in self.models.values() for key in {id(p) for p in model.parameters()})
        trained = {id(p) for model in self.models.values() for p in model.parameters() if p.requires_grad}
        shared = {key for key, count in users.items() if count > 1 and key in trained}
        return shared, bool(shared)

    def _parameter_groups(self) -> list[dict]:
        """Weights decay; norms and biases (one dimension) do not. A shared parameter appears once.

        `part` is that of the rate: private weights have less of it where others are shared, norms what the recipe says.
        """
        decay = self.recipe.weight_decay
        trained = {id(p): p for model in self.models.values() for p in model.parameters() if p.requires_grad}
        several, anywhere = self._shared()
        shared, private, small = [], [], []
        for key, p in trained.items():
            (small if p.ndim <= 1 else shared if key in several else private).append(p)
        return [
            {"params": shared, "weight_decay": decay, "part": 1.0},
            {"params": private, "weight_decay": decay, "part": self.recipe.private if anywhere else 1.0},
            {"params": small, "weight_decay": 0.0, "part": self.recipe.norms},
        ]

    def _named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every trained parameter under all of its names, `QUERY/NAME`; a shared one has several."""
        for query, model in self.models.items():
            for name, p in model.named_parameters(remove_duplicate=False):
                if p.requires_grad:
                    yield f"{query}/{name}", p

    def _contributions(self, eased: Collection[str]) -> dict[str, int]:
        return self.recipe.contributions({query: len(self.sets[query]) for query in self.everyone}, eased)

    def _take_step(self) -> None:
        if self.step % self.steps == 0:
            self._losses, self._summed = 0.0, 0
        annealed = _annealed(self.step, self.steps * self.recipe.epochs)
        for group in self.optimiser.param_groups:
            group["lr"] = group["part"] * self.recipe.rate * annealed
        self._keep_momenta(max(annealed, MIN_MOMENTUM))
        while not self._learnt():
            layout = self._next_layout()
            layout.place((self.sets[query].prepared for query in self.models), self.device)
            self._lay_out(layout.recipe(self.recipe).node, layout.recompute)
        self.optimiser.step()
        self.step += 1

    def _keep_momenta(self, part: float) -> None:
        for norm, momentum in self._momenta.items():
            norm.momentum = part * momentum

    def _learnt(self) -> bool:
        """Leave a step's gradients in the parameters; False, and all as it was before, where memory was not enough."""
        before = self.flops.total, {query: len(one.known) for query, one in self._answers.items()}
        self._undo.note()
        self.optimiser.zero_grad(set_to_none=True)
        try:
            self._count_work()
            self._learn_all()
            return True
        except Exception as error:
            if self.fitting is None or not is_out_of_memory(error):
                raise
        self.optimiser.zero_grad(set_to_none=True)
        empty_caches()
        self._undo.back()
        self.flops.total, known = before
        for query, answers in self._answers.items():
            answers.uncount(known[query])
        return False

    def _next_layout(self) -> StepConfig:
        """How steps are laid out from now on: for less memory than now."""
        assert self.fitting is not None
        return self.fitting.next(self.recipe)

    def _lay_out(self, node: int, recompute: bool) -> None:
        """From the next step on so many frames go through a model at once, and intermediates are kept or not."""
        self.recipe = replace(self.recipe, node=node, recompute=recompute)
        self._batches.split(node)

    def _count_work(self) -> None:
        """Add what this step takes to the work."""
        for query in self.everyone:
            nodes = self._batches.nodes(query, self.step)
            passes = self.recipe.passes(taught=False) * sum(map(len, nodes))
            for frames in nodes if self._taught() else ():
                passes += self._answers[query].count(frames) if query in self._answers else len(frames)
            self.flops.add(self.sets[query].query, passes)

    def _learn_all(self) -> None:
        """Leave a step's gradients, clipped, in the parameters, and add the losses up; or raise Diverged."""
        losses = {query: self._learn(query, nodes) for query, nodes in self._batches.at(self.step).items()}
        self._make_moments()
        parameters = [p for group in self.optimiser.param_groups for p in group["params"]]
        norm = nn.utils.clip_grad_norm_(parameters, MAX_GRADIENT_NORM)
        *values, norm = numbers([*losses.values(), norm.to(self.device)])
        if lost := [query for query, loss in zip(losses, values) if not math.isfinite(loss)]:
            raise Diverged(", ".join(lost))
        if not math.isfinite(norm):
            raise Diverged(", ".join(self.models))
        for loss in values:
            self._losses += loss
        self._summed += len(values)

    def _make_moments(self) -> None:
        """AdamW's moments, as it would make them itself: here a step can still be undone, later it is half taken."""
        for p in (p for group in self.optimiser.param_groups for p in group["params"]):
            if p.grad is not None and p not in self.optimiser.state:
                step = torch.zeros((), dtype=torch.float32, device=p.device)
                moments = (torch.zeros_like(p, memory_format=torch.preserve_format) for _ in range(2))
                self.optimiser.state[p] = {"step": step, **dict(zip(("exp_avg", "exp_avg_sq"), moments))}

    def _learn(self, query: str, nodes: Sequence[MicroBatch]) -> Tensor:
        """Add the gradient of the mean loss over the nodes; returns that loss, f64 (), where it was computed."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        with multiplying(self.precisions[query], self.device):
            for node in nodes:
                loss = self._node_loss(query, node) / len(nodes)
                loss.backward()
                total += loss.detach()
        return total

    def _node_loss(self, query: str, node: MicroBatch) -> Tensor:
        model, data, paths = self.models[query], self.sets[query], self._watched[query]
        images, stream = data.fed(node.images, self.device), RandomStream(node.seed, self.device)
        kept, computed = recomputed(model, self.recipe.recompute), autocast(self.precisions[query], self.device)
        with computed, stream.drawn(), record_inputs(model, paths) as seen, kept:
            outputs = model(images)
        example = None
        if (teacher := self.teachers.get(query)) is not None:
            answer = partial(self._answer, query, teacher)
            kept = self._answers.get(query)
            example = as_float32(answer(images) if kept is None else kept.of(node.frames, images, answer))
        with stream.drawn():
            return self._loss(query, node.targets, as_float32((outputs, seen)), example)

    def _answer(self, query: str, teacher: nn.Module, images: Tensor) -> tuple[Any, list[Tensor]]:
        """What the original makes of these images: its outputs, and what goes into the layers that are watched."""
        computed, seeing = autocast(self.precisions[query], self.device), record_inputs(teacher, self._watched[query])
        with torch.no_grad(), computed, seeing as seen:
            return teacher(images), seen

    def _loss(self, query: str, targets: list | None, answer: Any, example: Any) -> Tensor:
        """The loss of one node: `answer` and `example` are (outputs, features) of the model and of its original."""
        model, task, recipe = self.models[query], self.sets[query].task, self.recipe
        if example is None:
            assert targets is not None, "without labels there must be a teacher"
            return task.loss(model, answer[0], targets)
        loss = task.distill(model, answer[0], example[0])
        if targets is not None:
            loss = recipe.distill * loss + (1 - recipe.distill) * task.loss(model, answer[0], targets)
        if self._watched[query]:
            loss = loss + recipe.features * feature_loss(answer[1], example[1])
        return loss


def numbers(found: Sequence[Tensor]) -> list[float]:
    """The values of tensors (), once they are computed: where a step of training waits for a card, and it does once."""
    return torch.stack([one.detach().double() for one in found]).tolist()


def as_float32(outputs: Any) -> Any:
    """The tensors of a model's outputs as float32, for losses."""
    return tree_map(lambda value: value.float() if isinstance(value, Tensor) else value, outputs)


def _rest_frozen_norms(model: nn.Module) -> None:
    for part in model.modules():
        if isinstance(part, _BatchNorm) and is_frozen(part):
            part.eval()


def _rest_random_parts(model: nn.Module) -> None:
    """Dropout makes of every answer another one, while the original that is imitated answers with all it has."""
    for part in model.modules():
        if isinstance(part, DROPOUT_MODULES):
            part.eval()


def _annealed(step: int, total: int) -> float:
    warm = max(1, round(total * WARM_UP))
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warm) / max(1, total - warm))))
