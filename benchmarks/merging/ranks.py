"""What a rank of a merge holds and sends: memory after a step beside one process, bytes beside a flat all-reduce.

Usage: python -m benchmarks.merging.ranks [--ranks 4] [--workloads half families mixed]

Eight queries with random weights share layers in the first steps of a joint training. Memory is the anonymous part of
the PSS of the fullest rank, counted above that of a process that has imported the merger; bytes are those of the rank
that sends most, beside 2 (N - 1) / N of all trained bytes, what a ring of N ranks sends.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import torch
import yaml

from benchmarks.machine import machine
from benchmarks.real.tables import table
from gemel.merger.context import MergeContext
from gemel.merger.distributed import ProcessGroup, process_group
from gemel.merger.training.loop import OutOfTime
from gemel.merger.training.recipe import Recipe
from gemel.models.files.weights import save_weights
from gemel.models.process import trim_heap
from gemel.models.sharing.groups import Group, groups
from gemel.models.sharing.plan import SharingPlan
from gemel.models.workload import load_workload
from gemel.models.zoo import build_query

WORKLOADS = {
    "half": (["resnet18"] * 8, 0.5),
    "families": (["resnet18", "mobilenet_v3_large"] * 4, 0.7),
    "mixed": (["resnet18", "resnet34", "mobilenet_v2", "regnet_y_400mf"] * 2, 1.0),
}
"""The models of the queries, and the part of the bytes that they could share which they do share."""
SIDE, FRAMES, STEPS = 32, 8, 2
RECIPE = Recipe(epochs=1, batch=4, micro_batch=4)
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload([__name__])


def write_workload(folder: Path, models: list[str]) -> Path:
    """A workload of these models, with random weights and noise for frames."""
    draws, documents = np.random.default_rng(0), list[dict[str, Any]]()
    for index, model in enumerate(models):
        query = f"q{index}"
        for split in ("train", "val", "test"):
            for place in range(FRAMES):
                path = folder / "data" / query / split / "ab"[place % 2] / f"clip{place}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                cv2.imwrite(str(path), draws.integers(0, 255, (SIDE, SIDE, 3), np.uint8))
        documents.append({
            "id": query, "camera": "c", "task": "classification", "classes": ["a", "b"], "model": model,
            "input_size": SIDE, "data": f"data/{query}", "weights": f"{query}.safetensors",
        })  # fmt: skip
    path = folder / "workload.yaml"
    path.write_text(yaml.safe_dump({"name": "ranks", "cameras": {"c": {"source": "c.mp4"}}, "queries": documents}))
    for index, query in enumerate(load_workload(path).queries):
        torch.manual_seed(index)
        save_weights(folder / f"{query.id}.safetensors", build_query(query).state_dict())
    return path


def anonymous_bytes() -> int:
    """The anonymous part of this process's PSS."""
    trim_heap()
    rows = dict(row.split(":") for row in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return int(rows["Pss_Anon"].split()[0]) * 1024


def take_groups(ctx: MergeContext, part: float) -> SharingPlan:
    """The heaviest groups that together are at most this part of all."""
    every, taken = groups(ctx.layers, "wide"), list[Group]()
    for group in every:
        if sum(one.bytes for one in (*taken, group)) <= part * sum(one.bytes for one in every):
            taken.append(group)
    return SharingPlan.of(taken)


def train(group: ProcessGroup, path: Path, part: float) -> dict[str, Any]:
    """Some steps of a joint training: what this rank holds after them and sent in each."""
    before = anonymous_bytes()
    workload = load_workload(path)
    references: Any = {query.id: SimpleNamespace(eval_norms=False) for query in workload.queries}
    ctx = MergeContext(workload, group=group)
    ctx.references = references
    ctx.assign_queries()
    plan = take_groups(ctx, part)
    models = ctx.spread_models(plan, ctx.queries)
    training = ctx.training(models, RECIPE)
    training.is_over = lambda: training.step == STEPS
    group.sent_bytes = 0
    with suppress(OutOfTime):
        training.epoch()
    counts = Counter(p for model in models.values() for p in model.parameters())
    users = counts.items()
    return {
        "held": anonymous_bytes() - before, "sent": group.sent_bytes / STEPS,
        "shared": sum(p.nbytes for p, count in users if count > 1), "trained": sum(p.nbytes for p, _ in users),
    }  # fmt: skip


def run(path: Path, part: float, size: int) -> list[dict[str, Any]]:
    """Train in this many processes; what each tells."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        variables = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    answers = PROCESSES.SimpleQueue()
    ranks = [PROCESSES.Process(target=_run_rank, args=(variables, rank, path, part, answers)) for rank in range(size)]
    for rank in ranks:
        rank.start()
    found = [answers.get() for _ in ranks]
    for rank in ranks:
        rank.join()
    return found


def _run_rank(variables: dict[str, str], rank: int, path: Path, part: float, answers: Any) -> None:
    os.environ.update(variables, RANK=str(rank))
    torch.set_num_threads(1)
    with process_group() as group:
        answers.put(train(group, path, part))


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    given = parser.parse_args(arguments)
    rows = []
    for name in given.workloads:
        with tempfile.TemporaryDirectory() as folder:
            models, part = WORKLOADS[name]
            path = write_workload(Path(folder), models)
            (alone,), ranks = run(path, part, 1), run(path, part, given.ranks)
        held, sent = max(rank["held"] for rank in ranks), max(rank["sent"] for rank in ranks)
        flat = 2 * (given.ranks - 1) / given.ranks * alone["trained"]
        rows.append(
            (name, f"{alone['held'] / 1e6:.0f}", f"{held / 1e6:.0f}", f"{held / alone['held']:.2f}",
             f"{sent / 1e6:.1f}", f"{sent / flat:.3f}", f"{alone['shared'] / alone['trained']:.3f}")
        )  # fmt: skip
    heads = ("workload", "MB, 1 rank", "MB a rank", "ratio", "MB sent a step", "of a flat sum", "shared")
    print(table(f"{given.ranks} ranks on {machine()['cpu']}", heads, rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
