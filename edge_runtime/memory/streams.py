"""The stream that a card computes on: one for each device, made by us, so that others can be given its handle.

torch's default stream has the handle 0, which others (ONNX Runtime) take for "none given". torch has 32 streams of a
device and hands them out in turns; those of another priority are others. So nothing is ever copied on this one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

HIGH = -1
"""The priority: computing goes before whatever else a card does."""


def compute_stream(device: torch.device, cuda: Any = torch.cuda) -> Any:
    """The stream on which engines run and tensors are arranged; `cuda` is torch.cuda, or what stands in for it."""
    return _made(torch.device(device.type, device.index or 0), cuda)


@functools.cache
def _made(device: torch.device, cuda: Any) -> Any:
    return cuda.Stream(device, priority=HIGH)


@contextmanager
def computing(device: torch.device, cuda: Any = torch.cuda) -> Iterator[None]:
    """What is queued inside goes to the device's compute stream: after what the caller queued before, and before what
    the caller queues next. Nothing to do on the CPU.
    """
    if device.type == "cpu":
        yield
        return
    stream, before = compute_stream(device, cuda), cuda.current_stream(device)
    if stream == before:
        yield
        return
    stream.wait_stream(before)
    try:
        with cuda.stream(stream):
            yield
    finally:
        before.wait_stream(stream)
