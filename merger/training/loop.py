"""The one training loop: originals alone or merged models together, with labels, distillation, or both."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_map
from torchvision.ops import StochasticDepth

from gemel.merger.distributed import SINGLE_PROCESS, ProcessGroup
from gemel.merger.training.data import Batches, MicroBatch, TrainingSet, default_device, fork_rng
from gemel.merger.training.distillation import feature_loss, record_inputs, watched_layers
from gemel.merger.training.recipe import OPTIMIZER, Flops, Recipe
from gemel.merger.training.shared_gradients import SharedGradients
from gemel.merger.training.step_config import MemoryPlan, StepRollback, activation_checkpointing, autocast, place_frames
from gemel.models.batchnorm import batchnorms_of, is_frozen
from gemel.models.device import disable_tf32, empty_caches
from gemel.models.out_of_memory import is_out_of_memory
from gemel.models.process import keep_freed_memory

DROPOUT_MODULES = (_DropoutNd, StochasticDepth)


class Diverged(Exception):
    """The loss of these queries is not finite."""


class OutOfTime(Exception):
    """The budget was over in the middle of an epoch."""


class Training:
    """Trains models together; a parameter that several models share is once in the optimiser.

    A step is a function of its number, the models and the optimiser, so `state_dict` is all there is to store;
    `after_step` is called after each step, and before it `is_over`, which ends the epoch. `memory` holds the precision,
    fp32 (TF32 off) or bf16 (autocast), and the StepConfig: a step that runs out of memory is repeated with a smaller
    one. BatchNorm layers stay in eval mode where their parameters are frozen, and in the queries of `eval_norms`; so
    does dropout where there is a teacher.

    With a process group of several ranks, each rank trains its own queries; gradients of what ranks share are summed
    among these (merger.training.shared_gradients), so each has the same shared weights. Models of other ranks' queries
    are only looked at for what they share: they may be on the meta device. The result is that of one process, bit by
    bit.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        sets: Mapping[str, TrainingSet],
        recipe: Recipe,
        flops: Flops,
        teachers: Mapping[str, nn.Module] | None = None,
        *,
        eval_norms: Collection[str] = (),
        memory: MemoryPlan | None = None,
        group: ProcessGroup = SINGLE_PROCESS,
    ) -> None:
        keep_freed_memory()
        self.models, self.sets, self.flops = models, sets, flops
        self.teachers, self._eval_norms = teachers or {}, eval_norms
        self._own, self._is_joint = group.own(models), group.size > 1
        self.device = next((p.device for query in self._own for p in models[query].parameters()), default_device())
        self.memory, self._group = memory or MemoryPlan(), group
        self.memory.agree(recipe, group)
        self._precisions = {query: self.memory.precision_of(models[query]) for query in self._own}
        self.recipe = self.memory.config(recipe).apply(recipe)
        self.steps = math.ceil(recipe.contribution(map(len, (sets[query] for query in models))) / recipe.batch)
        """Optimiser steps in an epoch."""
        users = {query: [p for p in model.parameters() if p.requires_grad] for query, model in models.items()}
        groups, own = self._parameter_groups(), {id(p) for query in self._own for p in users[query]}
        leaders = {id(p): query for query in reversed(list(models)) for p in users[query]}
        self._parameters = [
            (p, id(p) in own, group.owner(leaders[id(p)]) == group.rank) for one in groups for p in one["params"]
        ]
        """Each trained parameter, whether a query of this rank has it, and whether this rank tells its norm."""
        groups = [{**one, "params": [p for p in one["params"] if id(p) in own]} for one in groups]
        self.optimiser = torch.optim.AdamW(groups, lr=recipe.rate, eps=OPTIMIZER.epsilon, fused=True)
        self._shared = SharedGradients(group, users, list(dict.fromkeys([*group.order, *models])))
        self.after_step: Callable[[], None] = lambda: None
        self.is_over: Callable[[], bool] = lambda: False
        self._rollback = StepRollback(models[query] for query in self._own)
        self.step = 0
        self._start_losses()
        own_sets = {query: sets[query] for query in models}
        self._place_frames()
        self._batches = Batches(
            own_sets, recipe.batch, self.recipe.micro_batch, self.steps * recipe.epochs, recipe.seed,
            prepares=self._own, pins=self.device.type == "cuda",
        )  # fmt: skip
        self._watched, self._watched_originals = {}, {}
        for query in self._own:
            model, teacher, original = models[query], self.teachers.get(query), sets[query].original.query
            watched = recipe.features > 0 and teacher is not None
            mine = watched_layers(sets[query].query, model) if watched else []
            theirs = watched_layers(original, teacher) if teacher is not None and watched else []
            alike = len(mine) == len(theirs)
            self._watched[query], self._watched_originals[query] = (mine, theirs) if alike else ([], [])
        taught = [models[query] for query in self._own if query in self.teachers]
        self._momenta = {norm: norm.momentum for model in taught for norm in batchnorms_of(model) if norm.momentum}

    @property
    def epochs(self) -> int:
        """Epochs finished."""
        return self.step // self.steps

    @property
    def loss(self) -> float:
        """Mean loss of the current epoch, or of the one just finished."""
        return sum(self._loss_values().values()) / max(1, self._loss_count)

    def epoch(self) -> float:
        """Train to the end of an epoch; returns its mean loss.

        Raises Diverged when a loss is not finite, and OutOfTime.
        """
        for query in self._own:
            model = self.models[query].train()
            _freeze_modes(model, query in self._eval_norms, dropout=query in self.teachers)
        end = (self.epochs + 1) * self.steps
        with disable_tf32():
            while self.step < end:
                if self.is_over():
                    raise OutOfTime
                self._compute_gradients()
                self.optimiser.step()
                self.step += 1
                self.after_step()
        self._scale_momenta(1.0)
        losses = self._loss_values()
        if lost := [query for query, loss in losses.items() if not math.isfinite(loss)]:
            raise Diverged(", ".join(lost))
        if not math.isfinite(float(self._norms)):
            raise Diverged(", ".join(self.models))
        return self.loss

    def state_dict(self) -> dict[str, Any]:
        """Everything that a later step depends on, on rank 0; tensors are not copied."""
        models = {query: self.models[query].state_dict() for query in self._own}
        moments = {name: self.optimiser.state.get(p, {}) for name, p in self._named_parameters(self._own)}
        parts = self._group.gather_on_rank0((models, moments))
        return {
            "step": self.step,
            "losses": self._loss_values(),
            "loss_count": self._loss_count,
            "models": {query: state for models, _ in parts for query, state in models.items()},
            "moments": {name: own for _, moments in parts for name, own in moments.items()},
            "step_config": [self.recipe.micro_batch, self.recipe.checkpointing],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the `state_dict` of the same training."""
        self.step, self._loss_count = state["step"], state["loss_count"]
        self._losses = {query: self._scalar(state["losses"][query]) for query in self._own}
        for query in self._own:
            self.models[query].load_state_dict(state["models"][query])
        named = self._named_parameters(self._own)
        known = {p: state["moments"][name] for name, p in named if state["moments"][name]}
        self.optimiser.state.clear()
        for p, moments in known.items():
            self.optimiser.state[p] = {name: value.to(p.device, copy=True) for name, value in moments.items()}
        self._set_step_config(*state["step_config"])

    def _scalar(self, value: float = 0.0) -> Tensor:
        return torch.full((), value, dtype=torch.float64, device=self.device)  # no copy from the host

    def _start_losses(self) -> None:
        self._losses = {query: self._scalar() for query in self._own}
        self._norms, self._loss_count = self._scalar(), 0

    def _loss_values(self) -> dict[str, float]:
        """The summed losses of all queries; the only place where the host waits for the GPU, once an epoch."""
        own = dict(zip(self._losses, torch.stack(list(self._losses.values())).tolist())) if self._losses else {}
        parts = self._group.all_gather_object(lambda: own) if self._is_joint else [own]
        found = {query: loss for part in parts for query, loss in part.items()}
        return {query: found[query] for query in self.models}

    def _parameter_groups(self) -> list[dict[str, Any]]:
        """Weights decay, norms and biases (one dimension) do not. `factor` multiplies the learning rate.

        Norms in eval mode learn slower: no batch statistics take back what a step changes.
        """
        decay = self.recipe.weight_decay
        users = Counter(key for model in self.models.values() for key in {id(p) for p in model.parameters()})
        trained = {id(p): p for model in self.models.values() for p in model.parameters() if p.requires_grad}
        fixed = {id(p) for query in self._eval_norms for p in self.models[query].parameters()}
        shared, private, small, slow = [], [], [], []
        for key, p in trained.items():
            small_ones = slow if key in fixed else small
            (small_ones if p.ndim <= 1 else shared if users[key] > 1 else private).append(p)
        any_shared = any(users[key] > 1 for key in trained)
        return [
            {"params": shared, "weight_decay": decay, "factor": 1.0},
            {"params": private, "weight_decay": decay, "factor": self.recipe.private if any_shared else 1.0},
            {"params": small, "weight_decay": 0.0, "factor": self.recipe.norms},
            {"params": slow, "weight_decay": 0.0, "factor": min(self.recipe.norms, OPTIMIZER.max_eval_norms)},
        ]

    def _named_parameters(self, queries: Iterable[str]) -> Iterator[tuple[str, nn.Parameter]]:
        """Every trained parameter of these queries as QUERY/NAME; a shared one appears under several names."""
        for query in queries:
            for name, p in self.models[query].named_parameters(remove_duplicate=False):
                if p.requires_grad:
                    yield f"{query}/{name}", p

    def _compute_gradients(self) -> None:
        if self.step % self.steps == 0:
            self._start_losses()
        factor = _learning_rate_factor(self.step, self.steps * self.recipe.epochs)
        for parameters in self.optimiser.param_groups:
            parameters["lr"] = parameters["factor"] * self.recipe.rate * factor
        self._scale_momenta(max(factor, OPTIMIZER.min_momentum_fraction))
        while not self._try_backward():
            config = self.memory.reduce(self.recipe, self._group)
            self._place_frames()
            self._set_step_config(config.apply(self.recipe).micro_batch, config.checkpointing)
        self._norms += self._clip_gradients().double()

    @torch.no_grad()
    def _clip_gradients(self) -> Tensor:
        """Scale all gradients where their norm is above the maximum; that norm, f32 () on the device.

        It is the norm of the norms of the parameters, in one order on all ranks.
        """
        zero = torch.zeros((), device=self.device)
        told = [
            torch.linalg.vector_norm(p.grad, dtype=torch.float32) if tells and p.grad is not None else zero
            for p, _, tells in self._parameters
        ]
        norms = torch.stack(told) if told else zero
        if self._is_joint and told:
            norms = norms.new_tensor(self._group.all_reduce_scalars(norms.tolist()))
        total = torch.linalg.vector_norm(norms)
        factor = (OPTIMIZER.max_gradient_norm / (total + 1e-6)).clamp(max=1.0)
        grads = [p.grad for p, own, _ in self._parameters if own and p.grad is not None]
        if grads:
            torch._foreach_mul_(grads, factor)  # type: ignore[attr-defined]
        return total

    def _scale_momenta(self, factor: float) -> None:
        for norm, momentum in self._momenta.items():
            norm.momentum = factor * momentum

    def _place_frames(self) -> None:
        config = self.memory.config(self.recipe)
        place_frames((self.sets[query].prepared for query in self._own), config, self.device)

    def _set_step_config(self, micro_batch: int, checkpointing: bool) -> None:
        self.recipe = replace(self.recipe, micro_batch=micro_batch, checkpointing=checkpointing)
        self._batches.set_micro_batch(micro_batch)

    def _try_backward(self) -> bool:
        """Compute the gradients of a step; False, with everything as before, when any rank ran out of memory."""
        flops = self.flops.total
        self._rollback.save()
        self.optimiser.zero_grad(set_to_none=True)
        self._count_flops()
        losses: dict[str, Tensor] = {}
        full = False
        try:
            for query, batch in self._batches.at(self.step).items():
                losses[query] = self._backward(query, batch)
                self._shared.take(query)
            if not self._is_joint:
                self._shared.finish()
                self._make_moments()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            full = True
        if self._is_joint:
            full = any(self._group.all_reduce_scalars([float(full)]))
            if not full:
                self._shared.finish()
        if full:
            losses.clear()
            self._shared.clear()
            self.optimiser.zero_grad(set_to_none=True)
            empty_caches()
            self._rollback.restore()
            self.flops.total = flops
            return False
        for query, loss in losses.items():
            self._losses[query] += loss
        self._loss_count += len(self.models)
        return True

    def _count_flops(self) -> None:
        for query in self.models:
            count = sum(map(len, self._batches.micro_batches(query, self.step)))
            self.flops.add(self.sets[query].query, self.recipe.passes(taught=False) * count)
            if query in self.teachers:
                self.flops.add(self.sets[query].original.query, count)

    def _make_moments(self) -> None:
        """Allocate AdamW's moments as it would itself, while the step can still be rolled back."""
        for p, _, _ in self._parameters:
            if p.grad is not None and p not in self.optimiser.state:
                step = torch.zeros((), dtype=torch.float32, device=p.device)
                moments = (torch.zeros_like(p, memory_format=torch.preserve_format) for _ in range(2))
                self.optimiser.state[p] = {"step": step, **dict(zip(("exp_avg", "exp_avg_sq"), moments))}

    def _backward(self, query: str, batch: Sequence[MicroBatch]) -> Tensor:
        """Add the gradient of the mean loss over the micro-batches; returns that loss, f64 () on the device."""
        total = self._scalar()
        for micro_batch in batch:
            loss = self._micro_batch_loss(query, micro_batch) / len(batch)
            loss.backward()
            total += loss.detach()
        return total

    def _micro_batch_loss(self, query: str, batch: MicroBatch) -> Tensor:
        model, data = self.models[query], self.sets[query]
        images, target = data.model_input(batch.images, self.device), None
        computing, recording = self._autocast(query), record_inputs(model, self._watched[query])
        saving = activation_checkpointing(model, self.recipe.checkpointing)
        with fork_rng(batch.seed, self.device):
            with computing, recording as features, saving:
                outputs = model(images)
            if (teacher := self.teachers.get(query)) is not None:  # draws no random numbers
                taught = (
                    images if batch.taught is batch.images else data.original.model_input(batch.taught, self.device)
                )
                target = _as_float32(self._teacher_outputs(query, teacher, taught))
            return self._loss(query, batch.targets, _as_float32((outputs, features)), target)

    def _autocast(self, query: str) -> torch.autocast:
        return autocast(self._precisions[query], self.device)

    def _teacher_outputs(self, query: str, teacher: nn.Module, images: Tensor) -> tuple[Any, list[Tensor]]:
        """The original's outputs and the inputs of its watched layers."""
        computing = self._autocast(query)
        recording = record_inputs(teacher, self._watched_originals[query])
        with torch.no_grad(), computing, recording as features:
            return teacher(images), features

    def _loss(self, query: str, labels: list | None, found: Any, target: Any) -> Tensor:
        """The loss of one micro-batch; `found` and `target` are (outputs, features) of model and original."""
        model, objective, recipe = self.models[query], self.sets[query].objective, self.recipe
        if target is None:
            assert labels is not None, "without labels there must be a teacher"
            return objective.loss(model, found[0], labels)
        loss = objective.distill(model, found[0], target[0])
        if labels is not None:
            loss = recipe.distill * loss + (1 - recipe.distill) * objective.loss(model, found[0], labels)
        if self._watched[query]:
            loss = loss + recipe.features * feature_loss(found[1], target[1])
        return loss


def _as_float32(outputs: Any) -> Any:
    return tree_map(lambda value: value.float() if isinstance(value, Tensor) else value, outputs)


def _freeze_modes(model: nn.Module, all_norms: bool, dropout: bool) -> None:
    """Put frozen BatchNorm layers in eval mode, or all of them; with `dropout` also dropout: the teacher has none."""
    for module in model.modules():
        frozen_norm = isinstance(module, _BatchNorm) and (all_norms or is_frozen(module))
        if frozen_norm or (dropout and isinstance(module, DROPOUT_MODULES)):
            module.eval()


def _learning_rate_factor(step: int, total: int) -> float:
    """Linear warm-up, then a cosine to zero."""
    warm = max(1, round(total * OPTIMIZER.warmup_fraction))
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warm) / max(1, total - warm))))
