"""Virtual nodes: a training batch is made of nodes of a fixed size, and the device only decides how many run at once.

Whatever depends on the batch is kept within a node: norms take each node's own statistics and update their running
ones node after node, and every random number a node needs comes from its own stream. So neither the step nor the
order depends on the device (Or, Zhang and Freedman, VirtualFlow, MLSys 2022).
Not covered: randomness that a foreign model draws outside dropout and stochastic depth modules, while several run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_flatten, tree_unflatten
from torchvision.ops import StochasticDepth

from models.detector import Detector, OneStage

RANDOM = (_DropoutNd, StochasticDepth)


def seed_of(*what: int | str) -> int:
    """A seed that depends on all of these and on nothing else."""
    return int.from_bytes(hashlib.blake2b(repr(what).encode(), digest_size=7).digest())


def can_run_together(model: nn.Module) -> bool:
    """Whether several nodes may go through the model at once: two-stage detectors answer in a form nobody can part."""
    return not isinstance(model, Detector) or isinstance(model, OneStage)


class Streams:
    """One stream of random numbers for each node, in place of the global one while that node is at work."""

    def __init__(self, seeds: Sequence[int], device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._states = [self._seeded(seed) for seed in seeds]

    def __len__(self) -> int:
        return len(self._states)

    @contextmanager
    def of(self, node: int) -> Iterator[None]:
        """Draw from this node's stream within; the global one goes on afterwards as if nothing had happened."""
        outside = self._read()
        self._write(self._states[node])
        try:
            yield
        finally:
            self._states[node] = self._read()
            self._write(outside)

    def _seeded(self, seed: int) -> list[Tensor]:
        devices = ["cpu"] if self._device is None else ["cpu", self._device]
        return [torch.Generator(device).manual_seed(seed).get_state() for device in devices]

    def _read(self) -> list[Tensor]:
        states = [torch.get_rng_state()]
        return states if self._device is None else [*states, torch.cuda.get_rng_state(self._device)]

    def _write(self, states: list[Tensor]) -> None:
        torch.set_rng_state(states[0])
        if self._device is not None:
            torch.cuda.set_rng_state(states[1], self._device)


@contextmanager
def apart(model: nn.Module, streams: Streams) -> Iterator[None]:
    """Within, a batch of as many equal nodes as there are streams goes through the model without the nodes mixing."""
    if len(streams) == 1:
        with streams.of(0):
            yield
        return
    parts: list[Any] = [part for part in model.modules() if isinstance(part, (_BatchNorm, *RANDOM))]
    for part in parts:
        part.forward = partial(_node_by_node, part.forward, streams, isinstance(part, RANDOM))
    try:
        yield
    finally:
        for part in parts:
            del part.forward


def split(outputs: Any, nodes: int) -> list[Any]:
    """What a model returned for so many equal nodes, node by node: tensors (nodes x N, ...) become (N, ...)."""
    if nodes == 1:
        return [outputs]
    leaves, shape = tree_flatten(outputs)
    parted = zip(*(leaf.chunk(nodes) for leaf in leaves))
    return [tree_unflatten(list(own), shape) for own in parted]


def _node_by_node(forward: Callable[[Tensor], Tensor], streams: Streams, random: bool, x: Tensor) -> Tensor:
    size = len(x) // len(streams)
    results = []
    for node in range(len(streams)):
        own = x[node * size : (node + 1) * size]
        if random:
            with streams.of(node):
                results.append(forward(own.clone()))  # some drop in place, and x may be needed as it is
        else:
            results.append(forward(own))
    return torch.cat(results)
