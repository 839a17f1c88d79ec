"""Two gloo processes that run one function: `run(function, *arguments)` returns the result of each rank."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gemel.merger.distributed import process_group

TIMEOUT_S = 240.0
PROCESSES = multiprocessing.get_context("forkserver")
"""Each rank is forked from one fresh process that has imported the merger, so that imports are paid once."""
PROCESSES.set_forkserver_preload(["gemel.merger", "gemel.merger.distributed", __name__])


def run(function: Callable[..., Any], *arguments: Any, size: int = 2) -> list[Any]:
    """Call `function(group, *arguments)` in this many processes; raises RuntimeError when one fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        variables = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        processes = [
            PROCESSES.Process(
                target=_run_rank, args=({**variables, "RANK": str(rank)}, Path(folder), function, arguments)
            )
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(TIMEOUT_S)
            process.kill()
            process.join()
        if any(process.exitcode for process in processes):
            raise RuntimeError("\n".join(path.read_text() for path in Path(folder).glob("error-*")))
        return [pickle.loads((Path(folder) / f"result-{rank}").read_bytes()) for rank in range(size)]


def _run_rank(environment: dict[str, str], folder: Path, function: Callable[..., Any], arguments: Any) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        with process_group() as group:
            result = function(group, *arguments)
            (folder / f"result-{group.rank}").write_bytes(pickle.dumps(result))
    except BaseException:
        (folder / f"error-{environment['RANK']}").write_text(traceback.format_exc())
        raise
