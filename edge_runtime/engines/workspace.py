"""The workspace of a run as its allocator saw it: kernels' own memory included, which no graph shows."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Peak bytes that torch's allocator had given out during `run`, beyond what it had before.

    What a library allocates by itself (ONNX Runtime, oneDNN's caches) is not seen. Run it once before: the first run
    sets up more than a run needs.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it says on stderr that it found no card
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as traced:
        run()
    live = peak = 0
    for event in traced.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            live += event.nbytes()  # type: ignore[attr-defined]
            peak = max(peak, live)
    return peak
