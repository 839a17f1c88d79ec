"""A worker's side, wherever it runs: its own workbench, and one task after the other."""

from __future__ import annotations

import hashlib
import importlib
import io
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from merger.bench.workbench import Reference, Workbench
from merger.journal.progress import Progress
from merger.journal.steps import Journal
from merger.training.precision import Settled
from merger.workers.jobs import Do, Done, Job, Order, threads
from models.errors import InputError
from models.weights.reading import fingerprint
from models.workload import Query, Workload


@dataclass(frozen=True)
class Setup:
    """What a worker makes its workbench of: the workload, what is known of the originals, and what must be alike."""

    workload: Workload
    seed: int
    device: str
    references: Mapping[str, Reference]
    fingerprints: Mapping[str, bytes]
    torch_version: str

    @classmethod
    def of(cls, bench: Workbench) -> Setup:
        """The main process's own."""
        workload = bench.workload
        prints = {query.id: _print(query) for query in workload.queries}
        return cls(workload, bench.seed, bench.device.type, dict(bench.references), prints, torch.__version__)

    def workbench(self, progress: Progress) -> Workbench:
        """A workbench that loads models and decodes frames when a job asks for them."""
        device = torch.device(self.device)
        return Workbench(self.workload, self.seed, progress, device, self.references)

    def check(self) -> None:
        """Raise InputError, which names this machine, where something is not here as it is in the main process."""
        node = platform.node()
        if torch.__version__ != self.torch_version:
            remedy = "install the same version everywhere: results would differ"
            raise InputError(node, f"has torch {torch.__version__}, not {self.torch_version}", remedy, "--ray")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise InputError(node, "has no GPU that torch can use", "merge on machines of one kind", "--ray")
        for query in self.workload.queries:
            if query.data is not None and not query.data.exists():
                raise InputError(node, f"has no {query.data} (query {query.id})", REACHABLE, "data")
            if isinstance(query.weights, Path) and not query.weights.exists():
                raise InputError(node, f"has no {query.weights} (query {query.id})", REACHABLE, "weights")
            if _print(query) != self.fingerprints[query.id]:
                fault = f"has other weights in {query.weights} (query {query.id})"
                raise InputError(node, fault, REACHABLE, "weights")


def _print(query: Query) -> bytes:
    return hashlib.sha256(fingerprint(query.weights)).digest()


REACHABLE = "the workload's files must be the same, at the same path, on every node"


@dataclass(frozen=True)
class Task:
    """A job on its way to a worker, without what it is given: names, threads, precisions."""

    name: str
    do: str
    threads: int
    precisions: Mapping[str, str]

    @classmethod
    def of(cls, job: Job, order: Order) -> Task:
        """The job under its order."""
        return cls(job.name, f"{job.do.__module__}:{job.do.__qualname__}", order.threads, dict(order.precisions))


class Desk:
    """Does one task after the other on a workbench of its own."""

    def __init__(self, setup: Setup, progress: Progress) -> None:
        setup.check()
        torch.manual_seed(setup.seed)
        self._bench = setup.workbench(progress)

    def do(self, task: Task, given: Mapping[str, Any], journal: Journal) -> Done:
        """The result and the work of a task; the journal remembers what was done of it before."""
        bench = self._bench
        bench.work.total = 0
        journal.meter = bench.work
        bench.precisions = Settled(task.precisions) if task.precisions else None
        with threads(task.threads):
            value = _found(task.do)(bench, journal, **given)
        return Done(value, bench.work.total)


def _found(name: str) -> Do:
    module, function = name.split(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


def write(content: Any, file: BinaryIO) -> None:
    """Plain values and tensors, for `read`."""
    torch.save(content, file)


def read(file: Any) -> Any:
    """What `write` wrote: a path or a file; nothing in it is run."""
    return torch.load(file, map_location=None, weights_only=True)


def packed(content: Any) -> bytes:
    """Plain values and tensors as bytes."""
    buffer = io.BytesIO()
    write(content, buffer)
    return buffer.getvalue()


def unpacked(content: bytes) -> Any:
    """Inverse of `packed`."""
    return read(io.BytesIO(content))
