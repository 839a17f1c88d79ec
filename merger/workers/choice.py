"""How many workers a merge has, where they run, and how many threads each may use."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from merger.bench.workbench import Workbench
from merger.journal.checkpoint import Checkpoint
from merger.workers.desk import Setup
from merger.workers.jobs import Nobody, Threads, Workers
from merger.workers.local import Processes
from merger.workers.pool import Pool
from models.errors import InputError

FOLDER = "jobs"
PROCESS_BYTES = 740 << 20
"""What a process with torch needs before it has done anything."""
COPIES = 8
"""A training holds weights, gradients, AdamW's two moments, the originals, and states on their way there and back."""
SPARE = 0.8
"""The part of the free memory that workers may take."""
MEMORY_FILES = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current")


@dataclass(frozen=True)
class Resources:
    """What a merge may use. None: as many workers as cores and memory allow (one on a GPU), threads as they divide up.

    With `threads`, every training of the merge uses so many: then its outcome is the same bit by bit with any number of
    workers. `ray` is the address of a cluster (`local` starts one here).
    """

    workers: int | None = None
    threads: int | None = None
    ray: str | None = None


def employ(bench: Workbench, resources: Resources, checkpoint: Checkpoint) -> Workers:
    """The workers of a merge, also those of the workbench from now on; the caller closes them.

    The threads of a merge that is resumed stay as they were. Raises InputError where that is not what is asked for,
    or where there is no such cluster.
    """
    setup, cores = partial(Setup.of, bench), len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    gpu = bench.device.type == "cuda"
    if resources.ray is not None:
        from merger.workers.cluster import Actors

        each = resources.threads or 1
        actors = Actors(setup, resources.ray, each, gpu, resources.workers)
        count = min(resources.workers or actors.most, max(1, actors.most))
        bench.workers = Pool(actors, count, bench.progress)
        told = {"workers": count, "on": resources.ray}
    else:
        each = resources.threads
        room = _room(bench, gpu, cores)
        count = resources.workers or room
        processes = Processes(setup, checkpoint.folder / FOLDER)
        bench.workers = Pool(processes, count, bench.progress) if count > 1 else Nobody()
        told = {"workers": count, "cores": cores, "each_bytes": needed_bytes(bench), "free_bytes": free_bytes()}
    asked = Threads(resources.threads or torch.get_num_threads(), each, count)
    bench.threads = _kept(asked, resources.threads is not None, checkpoint)
    if count > 1 or resources.workers is not None:
        bench.progress("workers", **told, threads=bench.threads.of(count))
    return bench.workers


def _room(bench: Workbench, gpu: bool, cores: int) -> int:
    if gpu:
        return 1
    return max(1, min(cores, int(SPARE * free_bytes() / needed_bytes(bench))))


def needed_bytes(bench: Workbench) -> int:
    """About what one worker needs: a process, all models as they train, decoded frames of train and val."""
    weights = sum(t.nbytes for model in bench.originals.values() for t in model.state_dict().values())
    frames = sum(bench.train[query].prepared.nbytes + bench.val[query].nbytes for query in bench.queries)
    return PROCESS_BYTES + COPIES * weights + frames


def free_bytes() -> int:
    """Memory that is free for more processes, within what this container may use."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return 0
    try:
        most, used = (Path(file).read_text().strip() for file in MEMORY_FILES)
        return free if most == "max" else max(0, min(free, int(most) - int(used)))
    except (OSError, ValueError):
        return free


def _kept(asked: Threads, by_hand: bool, checkpoint: Checkpoint) -> Threads:
    """The threads this merge began with."""
    known = checkpoint.part("threads")
    if not known:
        known.update(asked.__dict__)
    found = Threads(**known)
    if by_hand and (found.main, found.jobs) != (asked.main, asked.jobs):
        began = f"--threads {found.jobs}" if found.jobs else "no --threads"
        raise InputError("--threads", f"this merge began with {began}", "go on with the same, or without the option")
    return found
