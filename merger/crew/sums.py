"""Gradients of weights that several processes train, each summed over just these while the backward pass goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from merger.crew.crew import Link, Waiting


@dataclass(frozen=True)
class Common:
    """A weight that several processes train: the parameter here, and the ranks of these, in ascending order."""

    weight: nn.Parameter
    ranks: tuple[int, ...]


class Sums:
    """The sums of one training. `weights` stand in the same order everywhere, those first whose gradients come first.

    A sum begins as soon as the last backward pass that can touch a weight has done so, and all sums before it have
    begun: so all processes begin their sums in one order, whatever queries they have.
    """

    def __init__(self, link: Link, weights: Sequence[Common]) -> None:
        self._link, self._weights = link, weights
        self._left = [0] * len(weights)
        self._idle: Sequence[bool] = ()
        self._begun: list[tuple[int, Tensor, Waiting]] = []
        self._next = 0
        self._open = False
        for index, one in enumerate(weights):
            one.weight.register_post_accumulate_grad_hook(partial(self._touched, index))

    def begin(self, passes: Sequence[int], idle: Sequence[bool]) -> None:
        """A step begins: how many backward passes may touch each weight here, and which nobody trains in it."""
        self._left, self._idle = list(passes), idle
        self._begun, self._next, self._open = [], 0, True
        self._go_on()

    def finish(self) -> int:
        """All passes are done here: begin what is left, and put every sum in its weight's gradient.

        Returns the bytes that this process has handed over in this step.
        """
        self._left = [0] * len(self._weights)
        self._go_on()
        for index, total, waiting in self._begun:
            waiting.wait()
            weight = self._weights[index].weight
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            weight.grad.copy_(total)
        self._open = False
        return sum(total.nbytes for _, total, _ in self._begun)

    def _touched(self, index: int, weight: Tensor) -> None:
        if self._open:
            self._left[index] -= 1
            self._go_on()

    def _go_on(self) -> None:
        """Begin every sum that may."""
        while self._next < len(self._weights) and self._left[self._next] <= 0:
            index, one = self._next, self._weights[self._next]
            self._next += 1
            if self._idle[index]:
                continue
            grad = one.weight.grad
            own = torch.zeros_like(one.weight) if grad is None else grad
            # Weights lie in one order here and in another there; the sum is of values, not of places in memory.
            total = own.detach().clone(memory_format=torch.contiguous_format)
            self._begun.append((index, total, self._link.reduce(total, one.ranks)))
