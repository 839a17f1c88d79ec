"""Processes that work together as those of torchrun do, over gloo, each forked from one that has torch loaded."""

from __future__ import annotations

import io
import multiprocessing
import os
import socket
from collections.abc import Callable
from typing import Any

import torch

from merger.distributed import process_group

TIMEOUT_S = 60
_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload([__name__, "merger", "tests.merger.options", "tests.merger.tiny"])


class Hands:
    """`count` processes that call `work(crew, *given)`, at the top of a module, with plain values.

    Each does what comes `first` before it joins the others.
    """

    def __init__(self, count: int, flops: Callable[..., Any], *given: Any, first: Callable[[], Any] = dict) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        ends = [_forks.Pipe(duplex=False) for _ in range(count)]
        self.processes = [
            _forks.Process(target=_hand, args=(rank, count, port, said, flops, given, first))
            for rank, (_, said) in enumerate(ends)
        ]
        for process in self.processes:
            process.start()
        for _, said in ends:
            said.close()
        self._heard = [heard for heard, _ in ends]

    def answers(self) -> list[Any]:
        """What each returned, in order of rank, or the exception it ended with; EOFError of one that was killed."""
        found = []
        for heard in self._heard:
            assert heard.poll(TIMEOUT_S), "it does not come to an end"
            try:
                found.append(torch.load(io.BytesIO(heard.recv_bytes()), weights_only=False))
            except EOFError as error:
                found.append(error)
        for process in self.processes:
            process.join(TIMEOUT_S)
        return found


def together(count: int, flops: Callable[..., Any], *given: Any) -> list[Any]:
    """What `work` returns in each of so many processes; the first exception is raised here."""
    found = Hands(count, flops, *given).answers()
    for answer in found:
        if isinstance(answer, BaseException):
            raise answer
    return found


def _hand(
    rank: int, count: int, port: int, said: Any, flops: Callable[..., Any], given: tuple, first: Callable[[], Any]
) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=f"{rank}", WORLD_SIZE=f"{count}", MASTER_ADDR="127.0.0.1", MASTER_PORT=f"{port}")
    try:
        first()
        with process_group() as crew:
            answer = flops(crew, *given)
    except BaseException as error:
        answer = error
    content = io.BytesIO()
    torch.save(answer, content)
    said.send_bytes(content.getvalue())
    said.close()
