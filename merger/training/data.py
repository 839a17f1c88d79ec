"""Virtual nodes: a training batch is made of nodes of a fixed size, which go through the model one after the other.

Whatever depends on the batch is kept within a node: norms take each node's own statistics and update their running
ones node after node, and every random number a node needs comes from its own stream. So a step depends neither on the
order of what was drawn before it nor on the device (Or, Zhang and Freedman, VirtualFlow, MLSys 2022).

What is trained on at each step: a pure function of seed, query and step, prepared while the step before trains.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Protocol

import torch
import torchvision
from torch import Tensor
from torch.nn.modules.dropout import _DropoutNd

DROPOUT_MODULES = (_DropoutNd, torchvision.ops.StochasticDepth)


def seed_of(*what: int | str) -> int:
    """A seed that depends on all of these and on nothing else."""
    return int.from_bytes(hashlib.blake2b(repr(what).encode(), digest_size=7).digest(), "big")


class RandomStream:
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


@dataclass(frozen=True)
class MicroBatch:
    """The frames of one node, uint8 (N, 3, S, S), their targets (None without labels), its seed, and their indices."""

    images: Tensor
    targets: list | None
    seed: int
    frames: Sequence[int]


class FrameSource(Protocol):
    """Where frames come from; `merger.training.loop.TrainingSet` is one."""

    def __len__(self) -> int: ...

    def batch(self, indices: list[int], generator: torch.Generator) -> tuple[Tensor, list | None]:
        """uint8 frames of these indices, augmented by draws from the generator, where they lie, and their targets."""
        ...


Batch = Mapping[str, Sequence[MicroBatch]]


class Batches:
    """The batches of `steps` steps, each with `batch` frames of a query in nodes of `node` frames.

    The next step's batch is prepared in a thread of its own, as uint8: a quarter of what a model is fed. Frames of a
    query follow one shuffled order after the other; a split smaller than a batch gives as many whole nodes as it has,
    or one smaller node. `shares` are the parts of the steps in which queries take part (all, where nothing is said), at
    even distances and not all at once. `pins` frames for a card that is trained on where they do not lie there: to pin
    them opens a context, which takes memory. `prepares` are the queries whose frames are wanted here, all where nothing
    is said.
    """

    pins = False
    prepares: Collection[str] | None = None

    def __init__(
        self,
        sets: Mapping[str, FrameSource],
        batch: int,
        node: int,
        steps: int,
        seed: int,
        shares: Mapping[str, Fraction] | None = None,
    ) -> None:
        self._sets, self._steps, self._seed = sets, steps, seed
        self._shares = dict(shares or {})
        self._begin = {query: Fraction(index, len(sets)) for index, query in enumerate(sets)}
        self._batch = batch
        self._orders = lru_cache(maxsize=2 * len(sets))(self._order)
        self._worker = ThreadPoolExecutor(1, "batches")
        self._ahead: tuple[int, Future[Batch]] | None = None
        self.split(node)

    def share(self, shares: Mapping[str, Fraction]) -> None:
        """From the next step on other `shares`."""
        self._shares, self._ahead = dict(shares), None

    def split(self, node: int) -> None:
        """From the next step on nodes of so many frames."""
        self._counts = {query: _whole_nodes(min(self._batch, len(data)), node) for query, data in self._sets.items()}
        self._node, self._ahead = node, None

    def at(self, step: int) -> Batch:
        """The batch of this step."""
        ahead, self._ahead = self._ahead, None
        batch = ahead[1].result() if ahead is not None and ahead[0] == step else self.prepare(step)
        if step + 1 < self._steps:
            self._ahead = (step + 1, self._worker.submit(self.prepare, step + 1))
        return batch

    def prepare(self, step: int) -> Batch:
        """The batch of this step, made here and now."""
        wanted = self._sets if self.prepares is None else [query for query in self._sets if query in self.prepares]
        return {query: self._filled(query, step) for query in wanted if self._turn(query, step) is not None}

    def count(self, query: str, step: int) -> int:
        """How many frames a query contributes to this step."""
        return 0 if self._turn(query, step) is None else self._counts[query]

    def frames(self, query: str, step: int) -> list[int]:
        """The indices of the frames that a query contributes to this step."""
        turn, count, length = self._turn(query, step), self._counts[query], len(self._sets[query])
        if turn is None:
            return []
        places = range(turn * count, (turn + 1) * count)
        return [self._orders(query, place // length)[place % length] for place in places]

    def nodes(self, query: str, step: int) -> list[list[int]]:
        """These frames as they are parted into nodes."""
        indices = self.frames(query, step)
        return [indices[start : start + self._node] for start in range(0, len(indices), self._node)]

    def _turn(self, query: str, step: int) -> int | None:
        """How often the query has taken part before this step; None where it does not take part."""
        share = self._shares.get(query, Fraction(1))
        before, after = (math.floor(at * share + self._begin[query]) for at in (step, step + 1))
        return before if after > before else None

    def _filled(self, query: str, step: int) -> list[MicroBatch]:
        found, start = [], 0
        for frames in self.nodes(query, step):
            seed = seed_of("node", self._seed, query, step, start)
            start += len(frames)
            images, targets = self._sets[query].batch(frames, torch.Generator().manual_seed(seed))
            pinned = images.pin_memory() if self.pins and not images.is_cuda else images
            found.append(MicroBatch(pinned, targets, seed, frames))
        return found

    def _order(self, query: str, turn: int) -> list[int]:
        draws = torch.Generator().manual_seed(seed_of("order", self._seed, query, turn))
        return torch.randperm(len(self._sets[query]), generator=draws).tolist()


def _whole_nodes(frames: int, node: int) -> int:
    return frames if frames <= node else frames - frames % node
