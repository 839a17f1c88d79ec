"""What figures were measured on, and what a process holds."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch


def machine() -> dict[str, Any]:
    """Processor, cores, threads and device at work, versions, and how busy the machine was (load over a minute).

    Of a GPU also whether it may compute in TF32, and whether it must do the same thing twice in the same way.
    """
    on_card = torch.cuda.is_available()
    settings = {
        "tf32": [torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    return {
        "cpu": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if on_card else "cpu",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load": round(os.getloadavg()[0], 1),
        **(settings if on_card else {}),
    }


def held_bytes() -> dict[str, int]:
    """Bytes that this process alone holds: `uss`, all of them, and `anonymous`, those that no file stands behind."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines()[1:]
    fields = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    return {"uss": fields["Private_Clean"] + fields["Private_Dirty"], "anonymous": fields["Anonymous"]}


def _processor() -> str:
    known = Path("/proc/cpuinfo")
    lines = known.read_text(encoding="utf-8").splitlines() if known.is_file() else []
    named = (line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
