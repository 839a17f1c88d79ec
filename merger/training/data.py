"""Training batches: a pure function of seed, query and step, prepared in a thread while the step before trains.

A batch consists of micro-batches of a fixed size that pass through the model one after the other. BatchNorm uses the
statistics of one micro-batch, and each has its own random stream, so a step does not depend on what was drawn before
it, nor on the device (Or, Zhang and Freedman, VirtualFlow, MLSys 2022).
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from gemel.merger.objectives import objective_of
from gemel.models.data import PreparedFrames
from gemel.models.predictions import GroundTruth
from gemel.models.tensors import normalise_frames
from gemel.models.workload import Query
from gemel.models.zoo import preprocess_of


def default_device() -> torch.device:
    """The GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def seed_of(*parts: int | str) -> int:
    """A seed that depends on all parts and on nothing else."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=7).digest(), "big")


class TrainingSet:
    """The train split of one query, batch by batch, augmented by its task.

    `original` is the same split as the query's original takes it, where another network answers the query. `answers`
    are used as labels where there are none.
    """

    def __init__(
        self,
        query: Query,
        prepared: PreparedFrames,
        original: TrainingSet | None = None,
        answers: Sequence[GroundTruth] | None = None,
    ) -> None:
        self.query, self.prepared, self.answers = query, prepared, answers
        self.original: TrainingSet = original or self
        self.objective = objective_of(query)
        self.preprocess = preprocess_of(query)

    def __len__(self) -> int:
        return len(self.prepared)

    @cached_property
    def targets(self) -> list | None:
        """The target of each frame, None without labels."""
        labels, sizes = self.prepared.split.labels or self.answers, self.prepared.sizes(range(len(self)))
        return None if labels is None else self.objective.targets(labels, sizes, self.query.classes, self.preprocess)

    def spread(self, count: int) -> list[int]:
        """The indices of this many frames, or of all, at even distances."""
        count = min(count, len(self))
        return [int((place + 0.5) * len(self) / count) for place in range(count)]

    def frames(self, indices: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
        """Normalised float32 frames (N, 3, H, W), not augmented, on this device."""
        return normalise_frames(self.preprocess, self.prepared.batch(indices).to(device))

    def batch(self, indices: list[int], generator: torch.Generator) -> tuple[Tensor, list | None]:
        """uint8 frames (N, 3, H, W) on the device that keeps them, augmented, and their targets (None without labels).

        Random numbers are drawn on the CPU, so they are the same for every device.
        """
        targets = None if self.targets is None else [self.targets[index] for index in indices]
        return self.objective.augment(self.prepared.batch(indices), targets, generator)

    def model_input(self, images: Tensor, device: torch.device) -> Tensor:
        """Such frames as the model's input: normalised float32 on this device."""
        return normalise_frames(self.preprocess, images.to(device, non_blocking=True))


@dataclass(frozen=True)
class MicroBatch:
    """Frames that pass through the model at once: uint8 (N, 3, H, W), targets, and the random seed.

    `taught` are the same frames as the original takes them.
    """

    images: Tensor
    targets: list | None
    seed: int
    taught: Tensor


class Batches:
    """The batches of all steps: `batch` frames of each query, in micro-batches.

    Frames of a query follow one shuffled order after the other. A split smaller than a batch contributes as many whole
    micro-batches as it has, or one smaller one. `prepares` are the queries whose frames this process needs; `pins`
    page-locks frames in host memory.
    """

    def __init__(
        self,
        sets: Mapping[str, TrainingSet],
        batch: int,
        micro_batch: int,
        steps: int,
        seed: int,
        *,
        prepares: Collection[str],
        pins: bool = False,
    ) -> None:
        self._sets, self._steps, self._seed, self._batch = sets, steps, seed, batch
        self._prepares, self._pins = prepares, pins
        self._order = lru_cache(maxsize=2 * len(sets))(self._shuffle)
        self._worker = ThreadPoolExecutor(1, "batches")
        self._next: tuple[int, Future[dict[str, list[MicroBatch]]]] | None = None
        self.set_micro_batch(micro_batch)

    def set_micro_batch(self, micro_batch: int) -> None:
        """Change the size of micro-batches, from the next step on."""
        self._micro_batch, self._next = micro_batch, None

    def at(self, step: int) -> dict[str, list[MicroBatch]]:
        """The micro-batches of each query in this step; the next step is prepared meanwhile."""
        ahead, self._next = self._next, None
        batch = ahead[1].result() if ahead is not None and ahead[0] == step else self._prepare(step)
        if step + 1 < self._steps:
            self._next = (step + 1, self._worker.submit(self._prepare, step + 1))
        return batch

    def micro_batches(self, query: str, step: int) -> list[list[int]]:
        """The indices of the frames that a query contributes to this step, by micro-batch."""
        length = len(self._sets[query])
        count = min(self._batch, length)
        if count > self._micro_batch:
            count -= count % self._micro_batch
        places = range(step * count, (step + 1) * count)
        indices = [self._order(query, place // length)[place % length] for place in places]
        return [indices[start : start + self._micro_batch] for start in range(0, count, self._micro_batch)]

    def _prepare(self, step: int) -> dict[str, list[MicroBatch]]:
        return {query: self._load(query, step) for query in self._prepares}

    def _load(self, query: str, step: int) -> list[MicroBatch]:
        found, start = [], 0
        for frames in self.micro_batches(query, step):
            seed = seed_of("node", self._seed, query, step, start)
            start += len(frames)
            data = self._sets[query]
            images, targets = data.batch(frames, torch.Generator().manual_seed(seed))
            taught = images
            if data.original.prepared is not data.prepared:
                taught, _ = data.original.batch(frames, torch.Generator().manual_seed(seed))
            if self._pins and not images.is_cuda:
                images, taught = images.pin_memory(), taught.pin_memory()
            found.append(MicroBatch(images, targets, seed, taught))
        return found

    def _shuffle(self, query: str, turn: int) -> list[int]:
        draws = torch.Generator().manual_seed(seed_of("order", self._seed, query, turn))
        return torch.randperm(len(self._sets[query]), generator=draws).tolist()


@contextmanager
def fork_rng(seed: int, device: torch.device) -> Iterator[None]:
    """Draw random numbers from this seed within; afterwards the global streams go on unchanged."""
    on_gpu = device.type == "cuda"
    with torch.random.fork_rng([device] if on_gpu else []):
        torch.default_generator.manual_seed(seed)
        if on_gpu:
            torch.cuda.manual_seed(seed)
        yield
