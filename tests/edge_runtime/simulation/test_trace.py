"""A trace that cannot be written ends; who tells it of frames never waits and never hears of it."""

from __future__ import annotations

import os

import pytest

from gemel.edge_runtime.simulation import trace
from gemel.edge_runtime.simulation.trace import TraceWriter


def test_trace_writer_full_disk_ends_the_trace():
    writer = TraceWriter("/dev/full")
    for number in range(100):
        writer.frame("a", float(number), float(number))
    writer.close()
    writer.frame("a", 1.0, 1.0)
    assert writer.refused is not None and writer.refused.startswith("/dev/full: trace: cannot be written: No space")


def test_trace_writer_blocked_reader_ends_the_trace(tmp_path, monkeypatch):
    monkeypatch.setattr(trace, "MAX_WAITING_LINES", 50)
    monkeypatch.setattr(trace, "TIMEOUT_S", 0.05)
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    writer = TraceWriter(tmp_path / "pipe")
    for number in range(100_000):
        writer.frame("a", float(number), float(number))
        if writer.refused:
            break
    assert writer.refused == "50 lines of the trace wait to be written: the disk is too slow"
    writer.close()
    os.close(reader)


@pytest.mark.parametrize("count", [0, 3])
def test_trace_writer_close_writes_every_line(tmp_path, count):
    writer = TraceWriter(tmp_path / "trace.jsonl")
    for number in range(count):
        writer.frame("a", float(number), 0.5)
    writer.close()
    assert (tmp_path / "trace.jsonl").read_text() == "".join(
        f'{{"frame":["a",{number}.0,0.5]}}\n' for number in range(count)
    )
