"""The one training loop: originals alone and merged models together, with labels, distillation, or both."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from models.errors import InputError
from models.measure import flops
from models.prepared import Prepared
from models.tasks import task_of
from models.workload import Query
from models.zoo import build, preprocess_of

MAX_GRADIENT_NORM = 10.0
WARM_UP = 0.1
BACKWARD_PASSES = 2
MAX_DEPTHWISE = 0.25


class Diverged(Exception):
    """The loss is not a number any more."""


@dataclass(frozen=True)
class Recipe:
    """How to train. `rate` is AdamW's peak; it warms up over a tenth of the steps and falls to zero as a cosine.

    `frames_per_epoch` bounds what one query contributes to an epoch; `distill` is the weight of the originals'
    outputs against that of the labels (1 where there are no labels).
    """

    rate: float = 5e-4
    epochs: int = 4
    batch: int = 16
    frames_per_epoch: int = 512
    distill: float = 0.5
    weight_decay: float = 1e-2
    seed: int = 0

    def __post_init__(self) -> None:
        positive = {"rate": self.rate, "epochs": self.epochs, "batch": self.batch, "frames": self.frames_per_epoch}
        for name, value in positive.items():
            check(name, value > 0, value, "give a number above 0")
        check("distill", 0 <= self.distill <= 1, self.distill, "give a number from 0 to 1")


def check(name: str, sound: bool, value: float, remedy: str) -> None:
    """Raise InputError when an option's value is not sound."""
    if not sound:
        raise InputError("options", f"{value:g} makes no sense", remedy, name)


class TrainingSet:
    """The train split of one query, batch by batch, augmented by its task."""

    def __init__(self, query: Query, prepared: Prepared) -> None:
        self.query, self.prepared = query, prepared
        self.task = task_of(query.task)
        self.preprocess = preprocess_of(query.model, query.input_size)
        truths = prepared.split.truths
        every = range(len(prepared))
        self.targets = None if truths is None else self.task.targets(truths, prepared.sizes(every), query.classes)

    def __len__(self) -> int:
        return len(self.prepared)

    def batch(self, indices: list[int], generator: torch.Generator) -> tuple[Tensor, list | None]:
        """Normalised float32 frames (N, 3, S, S) and their targets (None without labels)."""
        images = self.prepared.batch(indices)
        targets = [self.targets[index] for index in indices] if self.targets is not None else [None] * len(indices)
        if self.targets is not None:
            images, targets = self.task.augment(images, targets, generator)
        return self.preprocess.normalise(images), targets if self.targets is not None else None


class Work:
    """Image passes x FLOPs spent in retraining; a backward pass counts as two forward ones."""

    def __init__(self, total: float = 0.0) -> None:
        self.total = total
        self._flops: dict[str, int] = {}

    def add(self, query: Query, passes: float) -> None:
        """Count `passes` forward passes of one image through the query's model."""
        if query.id not in self._flops:
            self._flops[query.id] = forward_flops(query)
        self.total += passes * self._flops[query.id]


def forward_flops(query: Query) -> int:
    """FLOPs of one frame through the query's model, found without weights."""
    model = build(query.model, query.classes, query.model_args, query.input_size, query.task, device="meta")
    return flops(model, query.input_size)


class Training:
    """Trains some models together, one epoch at a time; parameters that models share stand once in the optimiser."""

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        sets: Mapping[str, TrainingSet],
        recipe: Recipe,
        work: Work,
        teachers: Mapping[str, nn.Module] | None = None,
    ) -> None:
        self.models, self.sets, self.recipe, self.work = models, sets, recipe, work
        self.teachers = teachers or {}
        self.generator = torch.Generator().manual_seed(recipe.seed)
        longest = max(min(len(sets[query]), recipe.frames_per_epoch) for query in models)
        self.steps = math.ceil(longest / recipe.batch)
        self.optimiser = torch.optim.AdamW(_parameter_groups(models, recipe), lr=recipe.rate)
        total = self.steps * recipe.epochs
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimiser, lambda step: _annealed(step, total))
        self._orders = {query: _shuffled(len(sets[query]), self.generator) for query in models}

    def epoch(self) -> float:
        """One epoch; returns the mean loss. Raises Diverged when a loss is not finite."""
        for model in self.models.values():
            model.train()
        total = 0.0
        for _ in range(self.steps):
            self.optimiser.zero_grad(set_to_none=True)
            for query in self.models:
                loss = self._loss(query)
                if not torch.isfinite(loss):
                    raise Diverged(query)
                loss.backward()
                total += float(loss.detach())
            parameters = [p for group in self.optimiser.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(parameters, MAX_GRADIENT_NORM)
            self.optimiser.step()
            self.schedule.step()
        return total / (self.steps * len(self.models))

    def _loss(self, query: str) -> Tensor:
        model, data, recipe = self.models[query], self.sets[query], self.recipe
        indices = [next(self._orders[query]) for _ in range(min(recipe.batch, len(data)))]
        images, targets = data.batch(indices, self.generator)
        device = next(model.parameters()).device
        images = images.to(device, non_blocking=True)
        with autocast(model, device):
            outputs = as_float32(model(images))
        self.work.add(data.query, len(indices) * (1 + BACKWARD_PASSES))
        teacher = self.teachers.get(query)
        if teacher is None:
            assert targets is not None, "without labels there must be a teacher"
            return data.task.loss(model, outputs, targets)
        with torch.no_grad(), autocast(teacher, device):
            wanted = as_float32(teacher(images))
        self.work.add(data.query, len(indices))
        distilled = data.task.distill(model, outputs, wanted)
        if targets is None:
            return distilled
        return recipe.distill * distilled + (1 - recipe.distill) * data.task.loss(model, outputs, targets)


def autocast(model: nn.Module, device: torch.device) -> torch.autocast:
    """bfloat16 where it is faster: on a GPU, and on processors that multiply it unless many convolutions are depthwise.

    On such a processor it speeds ResNets up by about 1.5 and slows MobileNets at small inputs down.
    """
    grouped = [layer.groups > 1 for layer in model.modules() if isinstance(layer, nn.Conv2d)]
    depthwise = sum(grouped) > MAX_DEPTHWISE * len(grouped)
    wanted = device.type == "cuda" or (torch.cpu._is_avx512_bf16_supported() and not depthwise)
    return torch.autocast(device.type, torch.bfloat16, enabled=wanted)


def as_float32(outputs: Any) -> Any:
    """The tensors of a model's outputs as float32, for losses."""
    return tree_map(lambda value: value.float() if isinstance(value, Tensor) else value, outputs)


def _parameter_groups(models: Mapping[str, nn.Module], recipe: Recipe) -> list[dict]:
    """Weights decay; norms and biases (one dimension) do not. A shared parameter appears once."""
    unique = {id(p): p for model in models.values() for p in model.parameters() if p.requires_grad}
    return [
        {"params": [p for p in unique.values() if p.ndim > 1], "weight_decay": recipe.weight_decay},
        {"params": [p for p in unique.values() if p.ndim <= 1], "weight_decay": 0.0},
    ]


def _annealed(step: int, total: int) -> float:
    warm = max(1, round(total * WARM_UP))
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warm) / max(1, total - warm))))


def _shuffled(length: int, generator: torch.Generator) -> Iterator[int]:
    while True:
        yield from torch.randperm(length, generator=generator).tolist()
