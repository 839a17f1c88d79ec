"""A box that serves at half of what its weights take: the books balance, and nothing goes beyond the budget."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import cv2
import numpy as np
import torch
import yaml

from benchmarks.gpu.bundles import FAMILIES, FEW, bundle_of
from benchmarks.gpu.found import Found, Setting
from benchmarks.gpu.running import QUERIES
from gemel.edge_runtime.engines.torch_engine import TorchEngine
from gemel.edge_runtime.life.box import known_costs
from gemel.edge_runtime.life.daemon import run
from gemel.edge_runtime.memory.transfer_cuda import ALLOCATOR_SLACK_BYTES, CudaTransferBackend
from gemel.edge_runtime.scheduler.costs import all_bytes

SECONDS, MIN_SECONDS = 60.0, 1.0
FPS, PICTURES = 10, 40
KIB = 1024


def serve(setting: Setting, found: Found) -> None:
    """Four queries on a camera, half the memory that all of them take, for a minute."""
    model = FEW[0] if setting.small else FAMILIES[0]
    bundle = bundle_of(setting.folder / "box.safetensors", QUERIES, model, setting.small)
    engines = {one: TorchEngine(bundle, one, setting.device) for one in QUERIES}
    costs = known_costs(bundle, engines, None)
    budget = max(all_bytes(costs) // 2, *map(costs.alone_bytes, costs.queries))
    clip = setting.folder / "clip.mp4"
    writer = cv2.VideoWriter(str(clip), cv2.VideoWriter.fourcc(*"mp4v"), FPS, (320, 240))
    draws = np.random.default_rng(0)
    for _ in range(PICTURES):
        writer.write(cv2.resize(draws.integers(0, 256, (12, 16, 3), np.uint8), (320, 240)))
    writer.release()
    config = setting.folder / "box.yaml"
    config.write_text(
        yaml.safe_dump(
            {
                "bundle": "box.safetensors",
                "budget": f"{math.ceil(budget / KIB)}KiB",
                "engine": "torch",
                "device": setting.device.type,
                "cameras": {"bridge": {"source": "clip.mp4", "loop": True}},
                "sinks": [{"kind": "jsonl", "path": "results.jsonl"}],
            }
        )
    )
    with _counting_from_the_limit_on():
        summary = run(config, seconds=MIN_SECONDS if setting.small else SECONDS)
    accounts = summary["ledger"]
    found.holds("the_ledger_adds_up", summary["balanced"])
    found.holds("nothing_failed", not any(account["failed"] for account in accounts))
    found.takes_at_most("queries_without_an_answer", sum(not account["processed"] for account in accounts), 0)
    found.holds("no_fault", summary["fault"] is None)
    for name in ("swaps", "bytes_moved", "max_used_bytes", "budget_bytes", "overhead_bytes", "compactions"):
        found.note(name, summary[name])
    found.note("run_ms", {row["id"]: row["run_ms"] for row in summary["queries"]})
    found.note("processed", sum(account["processed"] for account in accounts))
    found.note("dropped", sum(sum(account["dropped"].values()) for account in accounts))
    if setting.on_gpu:
        reserved = torch.cuda.max_memory_reserved(setting.device)
        found.at_most("reserved_over_allowed", reserved / (summary["budget_bytes"] + ALLOCATOR_SLACK_BYTES), 1.0)


@contextmanager
def _counting_from_the_limit_on() -> Iterator[None]:
    """What was reserved at most counts from when the budget holds: workspaces are tried out before, without a limit."""
    plain = CudaTransferBackend.set_memory_limit

    def limit(transfer: CudaTransferBackend, budget_bytes: int | None) -> None:
        plain(transfer, budget_bytes)
        if budget_bytes is not None:
            torch.cuda.reset_peak_memory_stats()

    CudaTransferBackend.set_memory_limit = limit  # type: ignore[method-assign]
    try:
        yield
    finally:
        CudaTransferBackend.set_memory_limit = plain  # type: ignore[method-assign]
