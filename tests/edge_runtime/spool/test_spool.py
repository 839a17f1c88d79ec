"""The spool: bounded, private, whole files, and no caller waits for it."""

from __future__ import annotations

import json
import logging
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from edge_runtime import samples as at_work
from edge_runtime.config import SpoolConfig
from edge_runtime.samples import DRIFT_FILE, MAX_QUEUED, Spool, read_sample
from edge_runtime.sinks.base import ResultMessage
from tests.edge_runtime.sinks.messages import until
from tests.edge_runtime.tiny import picture, query

QUERIES = {name: query(name, "left") for name in ("gate", "yard")}
CHECK = {
    "format": 1, "checked_at": 1.7e9, "bundle": "ab" * 6,
    "queries": [{"id": "gate", "frames": 50, "ratio": 0.8, "ci95": [0.7, 0.9], "target": 0.95, "verdict": "below",
                 "reverted": True}],
}  # fmt: skip


def parcel(frame: int, name: str = "gate") -> ResultMessage:
    record = {"run": "r", "query": name, "camera": "left", "frame": frame, "captured_at": 1.7e9 + frame,
              "bundle": "ab" * 6, "label": "a", "score": 0.5}  # fmt: skip
    return ResultMessage(record, picture(frame))


@contextmanager
def working(folder, max_bytes: int = 2**20) -> Iterator[Spool]:
    """A spool in which every answer is due."""
    spool = Spool(SpoolConfig(folder, max_bytes, 0.0), QUERIES)
    spool.start()
    try:
        yield spool
    finally:
        spool.stop()


def keep(spool: Spool, *frames: int) -> None:
    for frame in frames:
        before = spool.samples + spool.unsampled.total()
        spool.offer(parcel(frame))
        until(lambda before=before: spool.samples + spool.unsampled.total() > before)


def test_spool_files_are_private(tmp_path):
    with working(tmp_path) as spool:
        spool.offer(parcel(1))
        spool.offer(parcel(2, "yard"))
    folder = tmp_path / "samples"
    names = sorted(os.listdir(folder))
    assert [read_sample(folder / name).head.query for name in names] == ["gate", "yard"]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE((folder / name).stat().st_mode) for name in names} == {0o600}
    nbytes = sum((folder / name).stat().st_size for name in names)
    assert spool.to_json() == {"samples": 2, "unsampled": {}, "bytes": nbytes}


def test_spool_evicts_oldest_across_restarts(tmp_path):
    folder = tmp_path / "samples"

    def size() -> int:
        return sum(one.stat().st_size for one in folder.iterdir())

    with working(tmp_path) as spool:
        keep(spool, *range(4))
        most = size()
    (folder / ".torn.png..1234.tmp").write_bytes(bytes(100))  # what a kill left
    with working(tmp_path, most) as spool:
        keep(spool, *range(4, 12))
        assert size() == spool.to_json()["bytes"] <= most
    frames = [read_sample(path).head.frame for path in sorted(folder.iterdir())]
    assert frames == list(range(frames[0], 12)) and 2 <= len(frames) <= 4


def test_spool_counts_too_large_sample(tmp_path):
    with working(tmp_path, 100) as spool:
        keep(spool, 1)
        assert spool.to_json() == {"samples": 0, "unsampled": {"too_large": 1}, "bytes": 0}


def test_spool_unwritable_is_logged_once_and_recovers(tmp_path, caplog):
    (tmp_path / "samples").write_text("in the way")
    with caplog.at_level(logging.INFO), working(tmp_path) as spool:
        keep(spool, 1, 2, 3)
        assert spool.to_json() == {"samples": 0, "unsampled": {"unwritable": 3}, "bytes": 0}
        (tmp_path / "samples").unlink()
        keep(spool, 4)
        assert spool.samples == 1
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and "samples" in said[0] and said[1] == "spool: samples are written again"


def test_spool_on_hanging_disk_blocks_nobody(tmp_path, monkeypatch):
    hangs, goes_on = threading.Event(), threading.Event()

    def slow(*given):
        hangs.set()
        assert goes_on.wait(30)
        return b"png"

    monkeypatch.setattr(at_work, "sample_bytes", slow)
    spool = Spool(SpoolConfig(tmp_path, 2**20, 0.0), QUERIES)
    spool.start()
    spool.offer(parcel(0))
    assert hangs.wait(30)
    for frame in range(1, 2 * MAX_QUEUED):
        spool.offer(parcel(frame))  # returns, though nothing is written
    assert spool._queue.qsize() == MAX_QUEUED and spool.unsampled["busy"] == MAX_QUEUED - 1
    goes_on.set()
    spool.stop()
    assert spool.samples == MAX_QUEUED + 1


def test_spool_reads_drift_report(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(at_work, "POLL_INTERVAL_S", 0.01)
    with working(tmp_path) as spool:
        (tmp_path / "new").write_text(json.dumps(CHECK))
        (tmp_path / "new").rename(tmp_path / DRIFT_FILE)
        until(lambda: spool.drift is not None)
        found = spool.drift
        assert found is not None and found.queries[0].ratio == 0.8 and found.checked_at == 1.7e9
        (tmp_path / "new").write_text(json.dumps({**CHECK, "queries": [{"id": "gate"}]}))
        (tmp_path / "new").rename(tmp_path / DRIFT_FILE)
        until(lambda: spool.drift is None)
        until(lambda: caplog.records)
        assert DRIFT_FILE in caplog.text and len(caplog.records) == 1
