"""The precision each model is trained in: measured once at the start of a merge, and kept from there on."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from merger.events import Progress, silent
from merger.training.distillation import feature_loss, record_inputs, watched_layers
from models.device import disable_tf32
from models.errors import InputError
from models.workload import Query

PRECISIONS = ("auto", "fp32", "tf32", "bf16")
MAX_DEPTHWISE = 0.25
FRAMES = 16
"""Frames of the batch that is timed, as many as a node has: what is spent on the weights is spent once for all."""
WORTH_IT = 1.05
"""What loses digits must be faster by this factor to be taken."""
AGREES = 0.01
"""And a copy of the original must begin with no more loss than this: of what goes into the heads, in shares of its
variance (`merger.training.distillation`)."""
ROUNDS, MIN_ROUNDS, ENOUGH_S = 4, 2, 6.0
"""Timed at most and at least so often; between these no more once that many seconds were spent on one model."""


def check_precision(option: str) -> None:
    """Raise InputError for an unknown option."""
    if option not in PRECISIONS:
        raise InputError("options", f"'{option}' is unknown", f"choose one of: {', '.join(PRECISIONS)}", "precision")


def autocast(precision: str, device: torch.device) -> torch.autocast:
    """bfloat16 where that was chosen; weights and losses stay float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


def multiplying(precision: str, device: torch.device) -> AbstractContextManager[None]:
    """Products of float32 on a card as the precision says, forwards and backwards: in TF32, or in full."""
    return disable_tf32(precision != "tf32") if device.type == "cuda" else nullcontext()


def by_rule(model: nn.Module, device: torch.device) -> str:
    """A guess that needs no clock: bf16 on a GPU and on processors that multiply it, on these unless much is depthwise.

    On such a processor it speeds ResNets up by about 1.5 and slows MobileNets at small inputs down.
    """
    grouped = [layer.groups > 1 for layer in model.modules() if isinstance(layer, nn.Conv2d)]
    depthwise = sum(grouped) > MAX_DEPTHWISE * len(grouped)
    if device.type == "cuda":
        wanted = torch.cuda.is_bf16_supported(including_emulation=False)  # before Ampere it is slower than float32
    else:
        wanted = torch.cpu._is_avx512_bf16_supported() and not depthwise
    return "bf16" if wanted else "fp32"


class Precisions:
    """The precision of every architecture of a merge; `known` is what was chosen before, and takes up new choices."""

    def __init__(self, option: str, known: MutableMapping[str, str], progress: Progress = silent) -> None:
        check_precision(option)
        self._option, self._known, self._progress = option, known, progress

    def of(self, query: Query, model: nn.Module, images: Callable[[], Tensor]) -> str:
        """fp32, tf32 (on a card) or bf16 for this query's model; timed, with `auto`, when first met.

        `images()` are frames f32 (N, 3, S, S).
        """
        key = _architecture(query)
        if key not in self._known and self._option != "auto":
            self._known[key] = self._option
        if key not in self._known:
            seconds = measured(model, images())
            self._known[key] = _chosen(seconds, partial(apart, query, model, images()))
            self._progress("precision", query=query.id, model=query.model, chosen=self._known[key], **seconds)
        return self._known[key]

    def unknown(self, query: Query) -> bool:
        """Whether `of` would have to measure."""
        return self._option == "auto" and _architecture(query) not in self._known

    def agree(self, found: Iterable[Mapping[str, str]]) -> None:
        """Keep what several processes know, the first where they chose differently, so that all do the same."""
        for known in reversed(list(found)):
            self._known.update(known)

    def to_plain(self) -> dict[str, str]:
        """What was chosen, as plain values."""
        return dict(self._known)

    def chosen(self, query: Query) -> str | None:
        """What `of` returned for this query's architecture; None where nobody has asked yet."""
        return self._known.get(_architecture(query))


class Settled:
    """The precision of every query's training, as it was chosen elsewhere."""

    def __init__(self, chosen: Mapping[str, str]) -> None:
        self._chosen = chosen

    def of(self, query: Query, model: nn.Module, images: Callable[[], Tensor]) -> str:
        """See `Precisions.of`."""
        return self._chosen[query.id]

    def unknown(self, query: Query) -> bool:
        """See `Precisions.unknown`: everything is known."""
        return False

    def agree(self, found: Iterable[Mapping[str, str]]) -> None:
        """See `Precisions.agree`: everything is known."""

    def to_plain(self) -> dict[str, str]:
        """See `Precisions.to_plain`: nobody has to be told."""
        return {}


def _architecture(query: Query) -> str:
    return json.dumps([query.model, query.model_args, query.input_size], default=str)


def _chosen(seconds: Mapping[str, float], loss: Callable[[str], float]) -> str:
    """The fastest that is worth what it loses, and does not lose much; float32 where there is none."""
    for precision in sorted(seconds, key=lambda one: seconds[one]):
        if seconds["fp32"] > WORTH_IT * seconds[precision] and loss(precision) <= AGREES:
            return precision
    return "fp32"


def apart(query: Query, model: nn.Module, images: Tensor, precision: str) -> float:
    """The loss with which a copy of this model would begin in another precision: the mean over what goes into its
    heads of the squared distance from float32's, in shares of the variance.
    """
    device, seen = next(model.parameters(), images).device, []
    for one in (precision, "fp32"):
        with torch.no_grad(), multiplying(one, device), autocast(one, device):
            with record_inputs(model, watched_layers(query, model)) as inputs:
                model(images.to(device))
            seen.append(inputs)
    return float(feature_loss(*seen))


def measured(model: nn.Module, images: Tensor) -> dict[str, float]:
    """Seconds of a forward and backward pass in every precision, the least of a few rounds that take turns; nothing
    where there is but one.
    """
    device = next(model.parameters()).device
    if len(kinds := offered(device)) == 1:
        return {}
    trial = copy.deepcopy(model).requires_grad_(True).train()
    images = images.to(device)
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for turn in range(ROUNDS + 1):  # the first pass of each only warms up
        for precision, times in seconds.items():
            times.append(_timed(trial, images, precision, device))
        if turn >= MIN_ROUNDS and sum(sum(times) for times in seconds.values()) > ENOUGH_S:
            break
    return {precision: min(times[1:]) for precision, times in seconds.items()}


def offered(device: torch.device) -> tuple[str, ...]:
    """The precisions that a device may be faster in. bf16 on a processor where oneDNN has code for it: elsewhere a step
    takes ten times as long (a Zen 3: ResNet-34 at 64 pixels 11.5 s for 0.8 s in float32).
    """
    if device.type == "cuda":
        return PRECISIONS[1:]
    return ("fp32", "bf16") if torch.ops.mkldnn._is_mkldnn_bf16_supported() else ("fp32",)


def _timed(model: nn.Module, images: Tensor, precision: str, device: torch.device) -> float:
    _wait_for(device)
    started = time.perf_counter()
    with multiplying(precision, device):
        with autocast(precision, device):
            outputs: Any = model(images)
        answers = [x for x in tree_leaves(outputs) if isinstance(x, Tensor) and x.requires_grad]
        torch.stack([answer.float().mean() for answer in answers]).sum().backward()
    _wait_for(device)
    return time.perf_counter() - started


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
