"""What the machine is, and how fast it copies at best."""

from __future__ import annotations

import torch

from benchmarks.gpu.found import Found, Setting
from benchmarks.machine import machine


def environment(setting: Setting, found: Found) -> None:
    """Versions, the GPU, and gigabytes a second: pinned to device, pageable to device, within the device."""
    found.note("machine", machine())
    found.note("cuda", torch.version.cuda)
    nbytes, device = setting.many(2**29, 2**20), setting.device
    there = torch.empty(nbytes, dtype=torch.uint8, device=device)
    beside = torch.empty_like(there)
    pageable = torch.zeros(nbytes, dtype=torch.uint8)
    pinned = pageable.pin_memory() if setting.on_gpu else pageable.clone()
    taken = setting.times(
        setting.many(9, 2),
        lambda: there.copy_(pinned, non_blocking=True),
        lambda: there.copy_(pageable),
        lambda: beside.copy_(there),
    )
    for name, seconds in zip(("pinned", "pageable", "within"), taken):
        found.note(f"copy_{name}_gb_s", nbytes / seconds / 1e9)
    if setting.on_gpu:
        properties = torch.cuda.get_device_properties(device)
        found.note("memory_bytes", properties.total_memory)
        found.note("integrated", bool(properties.is_integrated))
        size = 4096
        one = torch.randn(size, size, device=device)
        (seconds,) = setting.times(9, lambda: one @ one)
        found.note("product_tflops", 2 * size**3 / seconds / 1e12)
