"""The workbench of a worker on another machine, and the workers of a merge."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from merger.checkpoint import STATE, Checkpoint, StepCache
from merger.core.context import MergeContext
from merger.core.inputs import Reference
from merger.distributed import cut_bytes, partition
from merger.events import Progress
from merger.jobs import Done, Job, Order, Resources, Threads, torch_threads
from merger.training.precision import Settled
from merger.training.step_config import MemoryPlan
from merger.workers.cluster import Cluster, connected
from merger.workers.fellows import Fellows
from models.errors import InputError
from models.sharing.groups import groups
from models.weights import fingerprint
from models.workload import Query, Workload

MAX_THREADS = 1024
REACHABLE = "the workload's files must be the same, at the same path, on every node"


@dataclass(frozen=True)
class Setup:
    """What a worker makes its workbench of: the workload, what is known of the originals, and what must be alike."""

    workload: Workload
    seed: int
    device: str
    references: Mapping[str, Reference]
    fingerprints: Mapping[str, bytes]
    torch_version: str
    interval: bool

    @classmethod
    def of(cls, ctx: MergeContext) -> Setup:
        """The main process's own."""
        workload = ctx.workload
        prints = {query.id: _print(query) for query in workload.queries}
        return cls(workload, ctx.seed, ctx.device.type, dict(ctx.references), prints, torch.__version__, ctx.interval)

    def workbench(self, progress: Progress) -> MergeContext:
        """A workbench that loads models and decodes frames when a job asks for them."""
        device = torch.device(self.device)
        ctx = MergeContext(self.workload, self.seed, progress, device, self.references)
        ctx.interval = self.interval
        return ctx

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


class Desk:
    """Does one job after the other on a workbench of its own (merger.workers.cluster.Desk)."""

    def __init__(self, setup: Setup, progress: Progress) -> None:
        setup.check()
        torch.manual_seed(setup.seed)
        self._ctx = setup.workbench(progress)

    def do(self, job: Job, order: Order) -> Done:
        """The result and the work of a job."""
        ctx, journal = self._ctx, StepCache()
        ctx.flops.total = 0
        journal.meter = ctx.flops
        ctx.precisions = Settled(order.precisions) if order.precisions else None
        ctx.fitting = MemoryPlan(dict(order.layout), ctx.progress)
        with torch_threads(order.threads):
            value = job.do(ctx, journal, **job.given)
        return Done(value, ctx.flops.total)


@contextmanager
def employed(ctx: MergeContext, resources: Resources, checkpoint: Checkpoint) -> Iterator[None]:
    """The workbench with these resources: its threads, and the cluster's workers until the end, where there is one.

    The threads of a merge that is resumed stay as they were. Raises InputError where that is not what is asked for,
    or where there is no such cluster.
    """
    main = resources.threads or torch.get_num_threads()
    if ctx.crew.size > 1:  # each has as many as its machine gives it, or as it was told; floats add up as they do
        ctx.threads, ctx.workers = Threads(main, main), Fellows(ctx)
        yield
        ctx.workers = None
        return
    each = resources.threads or (main if resources.ray is None else 1)
    ctx.threads = _kept(Threads(main, each), resources.threads is not None, checkpoint)
    if resources.ray is None:
        yield
        return
    with connected(resources.ray) as ray:
        needs = {"GPU": 1} if ctx.device.type == "cuda" else {"CPU": ctx.threads.jobs}
        ctx.workers = cluster = Cluster(ray, partial(Desk, Setup.of(ctx)), needs, ctx.progress)
        ctx.progress("workers", workers=cluster.most, on=resources.ray, threads=ctx.threads.jobs)
        try:
            yield
        finally:
            cluster.close()


def assign(ctx: MergeContext) -> None:
    """Give each process of the crew its queries, by what a frame takes and by what could be shared."""
    crew = ctx.crew
    if crew.size == 1:
        return
    flops = {query: float(ctx.flops.of(found)) for query, found in ctx.queries.items()}
    shares = [({query for query, _ in group.members}, group.bytes) for group in groups(ctx.layers, "wide")]
    parts = crew.run_on_rank0(partial(partition, flops, shares, crew.size))
    crew.place(parts)
    loads = [sum(flops[query] for query in part) / sum(flops.values()) for part in parts]
    ctx.progress("crew", queries=parts, loads=loads, crossing_bytes=cut_bytes(parts, shares))


def _kept(asked: Threads, by_hand: bool, checkpoint: Checkpoint) -> Threads:
    """The threads this merge began with."""
    known = checkpoint.state("threads")
    if not known:
        known.update(asked.__dict__)
    if known.keys() != asked.__dict__.keys() or not all(
        type(count) is int and 1 <= count <= MAX_THREADS for count in known.values()
    ):
        raise InputError(
            checkpoint.folder / STATE, "its merge began with no number of threads", "remove the folder and start again"
        )
    found = Threads(**known)
    if by_hand and found != asked:
        fault = f"this merge began with {found.main} threads, {found.jobs} for each of several jobs"
        raise InputError("--threads", fault, "go on with the same, or without the option")
    return found
