"""Two gloo processes that run one function: `run(function, *arguments)` returns the result of each rank."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from merger.distributed import process_group


def run(function: Callable[..., Any], *arguments: Any, size: int = 2) -> list[Any]:
    """Call `function(group, *arguments)` in this many processes; raises RuntimeError when one fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        task = Path(folder) / "task"
        task.write_bytes(pickle.dumps((function.__module__, function.__qualname__, arguments)))
        environment = {
            **os.environ, "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd(),
        }  # fmt: skip
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.merger.two_ranks", folder],
                env={**environment, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True,
            )
            for rank in range(size)
        ]  # fmt: skip
        errors = [process.communicate(timeout=240)[1] for process in processes]
        if any(process.returncode for process in processes):
            raise RuntimeError("\n".join(errors))
        return [pickle.loads((Path(folder) / f"result-{rank}").read_bytes()) for rank in range(size)]


def main() -> None:
    """One rank."""
    import importlib

    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    module, name, arguments = pickle.loads((folder / "task").read_bytes())
    with process_group() as group:
        result = getattr(importlib.import_module(module), name)(group, *arguments)
        (folder / f"result-{group.rank}").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    main()
