"""Virtual nodes: a training batch is made of nodes of a fixed size, which go through the model one after the other.

Whatever depends on the batch is kept within a node: norms take each node's own statistics and update their running
ones node after node, and every random number a node needs comes from its own stream. So a step depends neither on the
order of what was drawn before it nor on the device (Or, Zhang and Freedman, VirtualFlow, MLSys 2022).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torchvision
from torch import Tensor
from torch.nn.modules.dropout import _DropoutNd

RANDOM = (_DropoutNd, torchvision.ops.StochasticDepth)


def seed_of(*what: int | str) -> int:
    """A seed that depends on all of these and on nothing else."""
    return int.from_bytes(hashlib.blake2b(repr(what).encode(), digest_size=7).digest(), "big")


class Stream:
    """The random numbers of one node, in place of the global ones while that node is at work."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        devices = ["cpu"] if self._device is None else ["cpu", self._device]
        self._states = [torch.Generator(one).manual_seed(seed).get_state() for one in devices]

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """Draw from this stream within, from where it stood; the global one goes on as if nothing had happened."""
        outside = self._read()
        self._write(self._states)
        try:
            yield
        finally:
            self._states = self._read()
            self._write(outside)

    def _read(self) -> list[Tensor]:
        states = [torch.get_rng_state()]
        return states if self._device is None else [*states, torch.cuda.get_rng_state(self._device)]

    def _write(self, states: list[Tensor]) -> None:
        torch.set_rng_state(states[0])
        if self._device is not None:
            torch.cuda.set_rng_state(states[1], self._device)
