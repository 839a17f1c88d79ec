"""The workspace of a run as its allocator saw it: kernels' own memory included, which no graph shows."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable

import torch
from torch import nn

from edge_runtime.memory.streams import computing

log = logging.getLogger("gemel.run")


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


def peak_of(model: nn.Module, input_size: int, count: int, device: torch.device) -> int:
    """The same of a run of `count` frames of an architecture (on the meta device), its weights left out.

    What kernels of a card's libraries take on top of intermediates is known to nobody else; they are chosen by how
    frames and weights lie, so these lie as engines want them. 0 where it cannot be tried: for lack of memory, because
    the model cannot do with weights that are all zero, or because a box serves within a limit meanwhile, whose memory
    it would take.
    """
    if device.type == "cuda" and torch.cuda.get_per_process_memory_fraction(device.index or 0) < 1.0:
        return 0
    try:
        with torch.inference_mode(), computing(device):
            there = copy.deepcopy(model).to_empty(device=device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            for tensor in there.state_dict().values():
                tensor.zero_()
            frames = torch.zeros(count, 3, input_size, input_size, device=device)
            frames = frames.contiguous(memory_format=torch.channels_last)
            there(frames)
            return frames.nbytes + peak_bytes(lambda: there(frames), device)
    except Exception as error:
        log.debug("the workspace of %s could not be measured: %s", type(model).__name__, error)
        return 0
