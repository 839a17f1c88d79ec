"""Run by tests as a process of its own: a merge that stores its state at every chance and is killed on the way.

Arguments: workload, bundle, method, then what kills it: `write N` (SIGKILL in the middle of the N-th write of the
checkpoint), `after SECONDS` (SIGKILL from a thread at any moment) or `never 0`.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch

import gemel.merger.checkpoint as checkpoint_module
from gemel.merger import merge
from gemel.models.workload import load_workload
from tests.merger.options import QUICK


def main() -> None:
    """Resume or begin the merge, which is killed as the arguments say."""
    workload, out, method, how, when = sys.argv[1:6]
    checkpoint_module.CONFIG = checkpoint_module.CheckpointConfig(0.0, float("inf"))
    torch.set_num_threads(1)
    if how == "write":
        _kill_in_write(int(when))
    if how == "after":
        threading.Timer(float(when), os.kill, (os.getpid(), signal.SIGKILL)).start()
    resume = Path(f"{out}.work").is_dir()
    merge(load_workload(workload), out, method, resume=resume, options=QUICK)
    os._exit(0)  # a timer may still be waiting


def _kill_in_write(number: int) -> None:
    """Replace torch.save by one that dies in the middle of its `number`-th file."""
    save, writes = torch.save, 0

    def dying(content: Any, file: Any) -> None:
        nonlocal writes
        writes += 1
        if writes == number:
            file.write(b"half a checkpoint")
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        save(content, file)

    torch.save = dying


if __name__ == "__main__":
    main()
