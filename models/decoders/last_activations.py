"""Which elements of a graph's outputs passed a Sigmoid or Softmax last, found by following them through the graph."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from gemel.models.decoders.heads import MOVING
from gemel.models.graph.steps import NetworkStep, StepKind, StepNetwork


class Activation(IntEnum):
    """What an element passed last, besides operators that only move values."""

    NONE = 0
    SIGMOID = 1
    SOFTMAX = 2


ACTIVATIONS = {"Sigmoid": Activation.SIGMOID, "Softmax": Activation.SOFTMAX}


def source_operator(steps: Sequence[NetworkStep], step: NetworkStep) -> str:
    """The operator that made the values which a step reads first, beyond those that only move them; else empty."""
    while step.sources and step.sources[0] > 0:
        step = steps[step.sources[0] - 1]
        if not (
            _operator(step) in MOVING or (step.kind is StepKind.FUNCTION and step.name == "part")
        ):
            return _operator(step)
    return ""


def _operator(step: NetworkStep) -> str:
    return step.name if step.kind is StepKind.OPERATOR else ""


@torch.no_grad()
def find_activations(
    network: StepNetwork, size: tuple[int, int], channels: int = 3
) -> tuple[Tensor, ...]:
    """The Activation of each element of each output, for one frame of (H, W)."""
    device = next((tensor.device for tensor in network.state_dict().values()), torch.device("cpu"))
    # The original may be in training, where its norms would learn from this.
    probe = copy.deepcopy(network).eval()
    outputs = probe.run_steps(torch.zeros(1, channels, *size, device=device), _put_codes)
    return tuple(output.to(torch.int8) for output in outputs)


def _put_codes(step: NetworkStep, result: Any) -> Any:
    """Codes of activations in place of values, from the latest operator on that made new ones."""
    if step.kind is StepKind.FUNCTION or _operator(step) in MOVING:
        return result
    code = float(ACTIVATIONS.get(_operator(step), Activation.NONE))
    return tree_map(
        lambda value: torch.full_like(value, code) if _is_float(value) else value, result
    )


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
