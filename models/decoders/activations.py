"""Which elements of a graph's outputs passed a Sigmoid or Softmax last, found by following them through the graph."""

from __future__ import annotations

import copy
from enum import IntEnum
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.utils._pytree import tree_map

from models.graph.operators import OPERATORS


class Activation(IntEnum):
    """What an element passed last, besides operators that only move values."""

    NONE = 0
    SIGMOID = 1
    SOFTMAX = 2


MOVING = frozenset({
    "Concat", "Expand", "Flatten", "Gather", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Transpose",
    "Unsqueeze",
})  # fmt: skip
"""Operators whose outputs are elements of their inputs."""
ACTIVATIONS = {"Sigmoid": Activation.SIGMOID, "Softmax": Activation.SOFTMAX}
_NAMES = {operator.run: name for name, operator in OPERATORS.items()}


def source_operator(node: Node) -> str:
    """The operator that made the values which a node reads first, beyond those that only move them; else empty."""
    source = node.all_input_nodes[0]
    while _name(source) in MOVING or source.target is getitem:
        source = source.all_input_nodes[0]
    return _name(source)


def _name(node: Node) -> str:
    return _NAMES.get(node.target, "") if node.op == "call_function" else ""  # type: ignore[call-overload]


@torch.no_grad()
def find_activations(network: GraphModule, size: tuple[int, int], channels: int = 3) -> tuple[Tensor, ...]:
    """The Activation of each element of each output, for one frame of (H, W)."""
    device = next((tensor.device for tensor in network.state_dict().values()), torch.device("cpu"))
    own = copy.deepcopy(network).eval()  # the original may be in training, where its norms would learn from this
    outputs = _Tracer(own).run(torch.zeros(1, channels, *size, device=device))
    return tuple(output.to(torch.int8) for output in outputs)


class _Tracer(Interpreter):
    """Computes with codes of activations in place of values, from the latest operator on that made new ones."""

    def run_node(self, n: Node) -> Any:
        found = super().run_node(n)
        name = _name(n)
        if n.op in ("placeholder", "output") or name in MOVING or (n.op == "call_function" and not name):
            return found
        code = float(ACTIVATIONS.get(name, Activation.NONE))
        return tree_map(lambda one: torch.full_like(one, code) if _is_float(one) else one, found)


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
