"""How one optimiser step fits the device: micro-batch size, where frames are kept, activation checkpointing, precision.

A step that runs out of memory is rolled back and repeated with a smaller configuration.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gemel.merger.distributed import ProcessGroup
from gemel.merger.training.recipe import Recipe
from gemel.models.data import PreparedFrames
from gemel.models.errors import InputError
from gemel.models.notes import add_note

AUTO, FP32, BF16 = "auto", "fp32", "bf16"
PRECISIONS = (AUTO, FP32, BF16)
HINT = "free memory and go on with --resume; or give smaller inputs or models, or start several processes with torchrun"


def check_precision(option: str) -> None:
    """Raise InputError for an unknown precision."""
    if option not in PRECISIONS:
        raise InputError("options", f"'{option}' is unknown", f"choose one of: {', '.join(PRECISIONS)}", "precision")


def autocast(precision: str, device: torch.device) -> torch.autocast:
    """bfloat16 forward passes for `bf16`; weights and losses stay float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == BF16)


def choose_precision(option: str, model: nn.Module) -> str:
    """fp32 or bf16; for `auto` bf16 where the processor itself computes it and no convolution is grouped.

    What a training step takes then, benchmarks/merging/precision.py measures.
    """
    if option != AUTO:
        return option
    convolutions = [part for part in model.modules() if isinstance(part, nn.Conv2d)]
    on_cpu = all(p.device.type == "cpu" for p in model.parameters())
    is_dense = bool(convolutions) and all(one.groups == 1 for one in convolutions)
    return BF16 if is_dense and on_cpu and has_bf16_units() else FP32


def has_bf16_units() -> bool:
    """Whether the processor multiplies bf16 (AMX or AVX-512 BF16), and oneDNN may (ONEDNN_MAX_CPU_ISA: in AVX2 it takes
    7 x as long)."""
    in_processor = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    return in_processor and torch.ops.mkldnn._is_mkldnn_bf16_supported()


@dataclass(frozen=True)
class StepConfig:
    """Frames of a micro-batch, whether train frames lie on the device, whether activations are checkpointed."""

    micro_batch: int
    frames_on_device: bool = True
    checkpointing: bool = False

    def apply(self, recipe: Recipe) -> Recipe:
        """The recipe with this micro-batch at most, one that divides the batch, and this checkpointing."""
        micro_batch = min(recipe.micro_batch, self.micro_batch)
        while recipe.batch > micro_batch and recipe.batch % micro_batch:
            micro_batch -= 1
        return replace(recipe, micro_batch=micro_batch, checkpointing=recipe.checkpointing or self.checkpointing)

    def smaller(self) -> StepConfig | None:
        """The next one, which takes less memory; micro-batches come last, as BatchNorm uses their statistics."""
        if self.frames_on_device:
            return replace(self, frames_on_device=False)
        if not self.checkpointing:
            return replace(self, checkpointing=True)
        return None if self.micro_batch % 2 else replace(self, micro_batch=self.micro_batch // 2)

    def __str__(self) -> str:
        place = "on the device" if self.frames_on_device else "in host memory"
        return f"micro-batches of {self.micro_batch}, frames {place}" + ", checkpointing" * self.checkpointing


class MemoryPlan:
    """The StepConfig and precision of all trainings of a merge; `known` comes from the checkpoint, updated in place."""

    def __init__(
        self,
        known: MutableMapping[str, Any] | None = None,
        precision: str = FP32,
    ) -> None:
        self._precision = precision
        self._known = {} if known is None else known

    def precision_of(self, model: nn.Module) -> str:
        """fp32 or bf16, in which the model's passes run."""
        return choose_precision(self._precision, model)

    def config(self, recipe: Recipe) -> StepConfig:
        """How this recipe is carried out now."""
        return StepConfig(**self._known) if self._known else StepConfig(min(recipe.micro_batch, recipe.batch))

    def reduce(self, recipe: Recipe, group: ProcessGroup) -> StepConfig:
        """Take the next smaller configuration and report it; InputError when there is none."""
        now = replace(self.config(recipe), micro_batch=min(recipe.micro_batch, recipe.batch))
        found = now.smaller()
        if found is None:
            error = InputError("memory", f"is full in the middle of training, with {now}", HINT)
            group.run_on_rank0(partial(_throw, error))
            raise error
        self._known.update(asdict(found))
        add_note("memory", f"it is full with {now}; the step is repeated with {found}")
        return found

    def agree(self, recipe: Recipe, group: ProcessGroup) -> None:
        """Take the smallest configuration of all ranks."""
        found = group.all_gather_object(lambda: self.config(recipe))
        if len(set(found)) > 1:
            least = min(found, key=lambda one: (one.frames_on_device, not one.checkpointing, one.micro_batch))
            self._known.update(asdict(least))


def _throw(error: Exception) -> None:
    raise error


def place_frames(sets: Iterable[PreparedFrames], config: StepConfig, device: torch.device) -> None:
    """Move train frames to the device, or to host memory; frames without room there stay where they are."""
    for frames in sets:
        frames.keep_on(device if config.frames_on_device else torch.device("cpu"))


class StepRollback:
    """Restores what a step changes before its gradients are complete: the models' buffers, e.g. running statistics."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        kinds = defaultdict[object, dict[int, Tensor]](dict)
        for buffer in (buffer for model in models for buffer in model.buffers()):
            kinds[buffer.dtype, buffer.device][id(buffer)] = buffer
        self._buffers = [list(found.values()) for found in kinds.values()]
        self._before = [[torch.empty_like(buffer) for buffer in buffers] for buffers in self._buffers]

    def save(self) -> None:
        """Remember the buffers at the start of a step."""
        for before, buffers in zip(self._before, self._buffers):
            torch._foreach_copy_(before, buffers)  # type: ignore[attr-defined]

    def restore(self) -> None:
        """Restore what was saved last."""
        for before, buffers in zip(self._before, self._buffers):
            torch._foreach_copy_(buffers, before)  # type: ignore[attr-defined]


@contextmanager
def activation_checkpointing(model: nn.Module, enabled: bool = True) -> Iterator[None]:
    """Within, blocks of the model keep only their inputs and run again in the backward pass.

    Blocks are the largest modules of at most sqrt(layers) layers (Chen et al., Training deep nets with sublinear memory
    cost, 2016). BatchNorm statistics are updated once.
    """
    blocks = list(_blocks(model, max(2, math.ceil(math.sqrt(_layers(model)))))) if enabled else []
    for block in blocks:
        block.forward = partial(_run_checkpointed, block, block.forward)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


def _blocks(module: nn.Module, max_layers: int) -> Iterator[nn.Module]:
    for child in module.children():
        if _layers(child) > max_layers:
            yield from _blocks(child, max_layers)
        elif _layers(child) > 1 and not _changes_input(child):
            yield child


def _run_checkpointed(block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    def contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
        return nullcontext(), _discard_buffer_updates(block)

    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


@contextmanager
def _discard_buffer_updates(block: nn.Module) -> Iterator[None]:
    owners = [owner for owner in block.modules() if owner._buffers]
    before = [owner._buffers for owner in owners]
    for owner in owners:
        owner._buffers = {name: None if one is None else one.clone() for name, one in owner._buffers.items()}
    try:
        yield
    finally:
        for owner, own in zip(owners, before):
            owner._buffers = own


def _layers(module: nn.Module) -> int:
    return sum(not part._modules for part in module.modules())


def _changes_input(module: nn.Module) -> bool:
    """Whether its first layer works in place: a checkpointed input must stay as it was."""
    first = next((part for part in module.modules() if not part._modules), module)
    return bool(getattr(first, "inplace", False))
