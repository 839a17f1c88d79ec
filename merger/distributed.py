"""Several processes in one merge: a torch.distributed process group, started by `torchrun` or by Ray Train.

Every process runs the same program and holds the models of all queries. A query belongs to one rank, which runs its
micro-batches and evaluates it; gradients are summed over all ranks, so every rank takes the same optimiser step.
"""

from __future__ import annotations

import io
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from queue import Empty
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from gemel.merger.heartbeat import RESTART_HINT, Heartbeat
from gemel.merger.rendezvous import agree_on_start
from gemel.models.errors import GemelError, InputError
from gemel.models.stages import Progress, silent

T = TypeVar("T")


@dataclass(frozen=True)
class DistributedConfig:
    """Limits of the process group; about `bucket_bytes` of gradients travel at once."""

    max_processes: int = 4096
    timeout: timedelta = timedelta(days=7)  # ranks wait while one works alone; heartbeats find one that hangs
    connect_timeout: timedelta = timedelta(seconds=120)
    bucket_bytes: int = 64 << 20
    ray_poll_s: float = 0.2
    ray_connect_timeout_s: float = 10.0


CONFIG = DistributedConfig()
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def is_later_start() -> bool:
    """Whether torchrun starts again what it started before, after a process ended."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


class PeerError(GemelError):
    """Another process of the group has ended; its own output says why."""


class PeerExit(SystemExit):
    """Rank 0 reports the same error; this rank ends silently with its exit code."""


@dataclass(frozen=True)
class _Outcome:
    """A value or the text of an error: exceptions do not travel between processes."""

    value: Any = None
    error: str = ""

    @classmethod
    def of(cls, compute: Callable[[], Any]) -> _Outcome:
        try:
            return cls(compute())
        except GemelError as error:
            return cls(error=str(error))


class ProcessGroup:
    """The processes of one merge as one of them sees it; a single process has rank 0 of size 1.

    All ranks call the collective methods in the same order. Within `local()` this rank is alone: `size` is 1 and no
    method waits for another rank. Methods raise PeerError when another process has ended. `order` has the queries in
    the order of ranks (merger.assignment); `sent_bytes` counts what `exchange` sent.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self._size = size
        self._local_depth = 0
        self._owners: dict[str, int] = {}
        self.order: list[str] = []
        self.sent_bytes = 0
        self._clock_offset_s = 0.0
        self._objects: Any = dist.new_group(backend="gloo", timeout=CONFIG.timeout) if size > 1 else None
        if size > 1:
            self._clock_offset_s = self.broadcast(time.monotonic()) - time.monotonic()

    @property
    def is_local(self) -> bool:
        """Whether this rank works alone within `local()`."""
        return self._local_depth > 0

    @property
    def size(self) -> int:
        """Processes that work together now: 1 within `local()`."""
        return 1 if self._local_depth else self._size

    @contextmanager
    def local(self) -> Iterator[None]:
        """Work alone within."""
        self._local_depth += 1
        try:
            yield
        finally:
            self._local_depth -= 1

    def assign(self, parts: Sequence[Sequence[str]]) -> None:
        """Give each rank its queries, in order of rank."""
        self._owners = {query: rank for rank, part in enumerate(parts) for query in part}
        self.order = list(self._owners)

    def owner(self, query: str) -> int:
        """The rank of this query; within `local()` this rank."""
        return self._owners.get(query, 0) if self.size > 1 else self.rank

    def owns(self, query: str) -> bool:
        """Whether this rank has the query, within `local()` too."""
        return self._size == 1 or self._owners.get(query, 0) == self.rank

    def own(self, queries: Iterable[str]) -> list[str]:
        """Those of these queries whose work this rank does now."""
        return [query for query in queries if self.owner(query) == self.rank]

    def broadcast(self, value: T) -> T:
        """The value that rank 0 has: plain values and tensors."""
        if self.size == 1:
            return value
        found = [_to_bytes(value) if self.rank == 0 else b""]
        with _peer_errors():
            dist.broadcast_object_list(found, 0, group=self._objects)
        return value if self.rank == 0 else _from_bytes(found[0])

    def run_on_rank0(self, compute: Callable[[], T]) -> T:
        """The result of rank 0, which computes it alone; a GemelError is raised on all ranks."""
        if self.size == 1:
            return compute()
        with self.local():
            own = _Outcome.of(compute) if self.rank == 0 else _Outcome()
        found = self.broadcast(own)
        self._raise(found)
        return found.value

    def all_gather_object(self, compute: Callable[[], T]) -> list[T]:
        """The result of every rank, each computed alone, in order of rank; the first GemelError is raised on all."""
        if self.size == 1:
            return [compute()]
        with self.local():
            own = _Outcome.of(compute)
        contents = [b""] * self.size
        with _peer_errors():
            dist.all_gather_object(contents, _to_bytes(own), group=self._objects)
        found = [_from_bytes(content) for content in contents]
        for one in found:
            self._raise(one)
        return [one.value for one in found]

    def clock(self) -> float:
        """Seconds of rank 0's monotonic clock, the same value on all ranks."""
        return self.broadcast(time.monotonic() + self._clock_offset_s)

    def all_reduce_scalars(self, values: Sequence[float]) -> list[float]:
        """Sums over all ranks, the same bits on each."""
        if self.size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        with _peer_errors():
            dist.all_reduce(total, group=self._objects)
        return total.tolist()

    def exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> None:
        """Send a contiguous tensor to each of some ranks, and fill those that come from them, on their device."""
        device = next(iter(sends.values())).device
        group = None if device.type == "cuda" else self._objects
        calls = [(dist.isend, sends), (dist.irecv, receives)]
        steps = [
            dist.P2POp(call, tensor, rank, group)
            for call, tensors in calls for rank, tensor in tensors.items() if tensor.numel()
        ]  # fmt: skip
        self.sent_bytes += sum(tensor.nbytes for tensor in sends.values())
        with _peer_errors():
            for step in dist.batch_isend_irecv(steps) if steps else ():
                step.wait()

    def gather_on_rank0(self, value: T) -> list[T]:
        """The values of all ranks in their order on rank 0; elsewhere the own one."""
        if self.size == 1:
            return [value]
        contents = [b""] * self.size if self.rank == 0 else None
        with _peer_errors():
            dist.gather_object(_to_bytes(value), contents, group=self._objects)
        return [value] if contents is None else [_from_bytes(content) for content in contents]

    def _raise(self, outcome: _Outcome) -> None:
        if outcome.error:
            raise GemelError(outcome.error) if self.rank == 0 else PeerExit(GemelError.exit_code)


SINGLE_PROCESS = ProcessGroup()


@dataclass(frozen=True)
class Resources:
    """What a merge may use: torch threads (None: torch's own number), a Ray cluster's address, the process group."""

    threads: int | None = None
    ray: str | None = None
    group: ProcessGroup = field(default=SINGLE_PROCESS)


def check_consistent(group: ProcessGroup, identity: Mapping[str, Any]) -> None:
    """Raise InputError when another rank has other files, options or another version of torch."""
    own = {**identity, "torch": torch.__version__}
    everyone = group.all_gather_object(lambda: own)

    def compare() -> None:
        for rank, other in enumerate(everyone):
            if differs := [key for key, value in other.items() if value != everyone[0][key]]:
                problem = f"process {rank} has another {' and '.join(differs)} than the first"
                raise InputError("torchrun", problem, "start all with the same command, files and version of torch")

    group.run_on_rank0(compare)


@contextmanager
def process_group(environment: Mapping[str, str] = os.environ) -> Iterator[ProcessGroup]:
    """The group that `torchrun` started, by its environment variables; without them a single process.

    Raises InputError for variables that make no sense, for more processes than GPUs, and when ranks do not connect.
    """
    rank, size = _rank_and_size(environment)
    if size == 1:
        yield ProcessGroup()
        return
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(_gpu_index(environment, rank, torch.cuda.device_count()))
    try:
        if not dist.is_initialized():
            limit, backend = CONFIG.connect_timeout, "cpu:gloo,cuda:nccl" if cuda else "gloo"
            store = next(rendezvous("env://", rank, size, timeout=limit))[0]
            start = agree_on_start(store, rank, size, limit.total_seconds())
            store = dist.PrefixStore(start, store)  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
        beats = Heartbeat(dist.distributed_c10d._get_default_store().clone(), rank, size)
        group = ProcessGroup(rank, size)
    except (RuntimeError, ValueError, TimeoutError) as error:
        where = f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
        reason = " ".join(str(error).split())[:120]
        raise InputError("torchrun", f"the processes do not find each other at {where} ({reason})") from error
    done = False
    try:
        yield group
        done = True
    finally:
        beats.stop(done)
        dist.destroy_process_group()


def _rank_and_size(environment: Mapping[str, str]) -> tuple[int, int]:
    if any(name not in environment for name in TORCHRUN_VARIABLES):
        return 0, 1
    try:
        rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    except ValueError:
        rank, size = -1, 0
    if not 0 <= rank < size <= CONFIG.max_processes:
        problem = f"{environment['RANK']} of {environment['WORLD_SIZE']} processes makes no sense"
        raise InputError("RANK", problem, "start with torchrun, or unset WORLD_SIZE")
    return rank, size


def _gpu_index(environment: Mapping[str, str], rank: int, gpus: int) -> int:
    """The GPU of this process; NCCL does not let two processes share one."""
    local, processes = int(environment.get("LOCAL_RANK", rank % gpus)), int(environment.get("LOCAL_WORLD_SIZE", 1))
    if max(local + 1, processes) > gpus:
        hint = "lower --nproc-per-node, or set CUDA_VISIBLE_DEVICES= to merge on the CPU"
        raise InputError("torchrun", f"starts more processes here than there are GPUs ({gpus})", hint)
    return local


def run_on_ray(address: str, entry: Callable[[ProcessGroup, Progress], T], progress: Progress) -> T:
    """Run `entry` in one process per GPU of a Ray cluster (without GPUs one per node) and return rank 0's result.

    `address` is what ray.init takes; `local` starts Ray on this machine. Events of rank 0 reach `progress`. Files must
    be at the same path on every node. Raises InputError without Ray, without the cluster, or for rank 0's GemelError.
    """
    try:
        import ray
        from ray.train import ScalingConfig
        from ray.train.torch import TorchTrainer
        from ray.util.queue import Queue
    except ImportError as error:
        raise InputError("--ray", "Ray Train is not installed", "pip install 'gemel[ray]'") from error
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        _check_listening(address)
        ray.init(address, log_to_driver=False, ignore_reinit_error=True)
    except (OSError, RuntimeError, ValueError) as error:
        problem = f"no cluster at '{address}': {' '.join(str(error).split())[:120]}"
        raise InputError("--ray", problem, "give local, auto, HOST:PORT or ray://HOST:PORT") from error
    try:
        gpus = int(ray.cluster_resources().get("GPU", 0))
        workers = gpus or sum(node["Alive"] for node in ray.nodes())
        messages = Queue()
        trainer = TorchTrainer(
            partial(_ray_worker, entry, messages),
            scaling_config=ScalingConfig(num_workers=workers, use_gpu=gpus > 0),
        )
        result: _Outcome | None = None
        with ThreadPoolExecutor(1, "ray") as pool:
            fit = pool.submit(trainer.fit)
            while result is None and not (fit.done() and messages.empty()):
                with suppress(Empty):
                    event, content = messages.get(timeout=CONFIG.ray_poll_s)
                    if event is None:
                        result = content
                    else:
                        progress(event, **content)
        if result is None or result.error:
            raise GemelError(result.error if result else f"the Ray job failed: {fit.exception()}")
        return result.value
    finally:
        ray.shutdown()


def _check_listening(address: str) -> None:
    """Raise OSError when nothing listens at HOST:PORT: Ray itself retries for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host, int(port)), CONFIG.ray_connect_timeout_s).close()


def _ray_worker(entry: Callable[[ProcessGroup, Progress], Any], messages: Any) -> None:
    """One rank of a Ray Train job: Ray has initialised torch.distributed already."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    group = ProcessGroup(dist.get_rank() if size > 1 else 0, size)

    def send(event: str, **fields: Any) -> None:
        messages.put((event, fields))

    outcome = _Outcome.of(lambda: entry(group, send if group.rank == 0 else silent))
    if group.rank == 0:
        messages.put((None, outcome))


@contextmanager
def _peer_errors() -> Iterator[None]:
    """Replace torch.distributed's message about a lost process, which differs between systems."""
    try:
        yield
    except RuntimeError as error:
        raise PeerError(f"another process of this merge has ended; {RESTART_HINT}") from error


def _to_bytes(value: Any) -> bytes:
    """Tensors keep no device: ranks may have other GPUs."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _from_bytes(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=False)


@contextmanager
def torch_threads(threads: int | None) -> Iterator[None]:
    """Use this many torch threads within; None changes nothing."""
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        if threads is not None:
            torch.set_num_threads(before)
