"""JSON lines on real files, full disks and pipes without a reader."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from gemel.edge_runtime.sinks.jsonl import JsonLines, JsonLinesConfig
from gemel.models.errors import InputError
from gemel.models.notes import collect_notes
from tests.edge_runtime.sinks.messages import make_message, read_frames, running_worker, until


def write_records(sink: JsonLines, *numbers: int) -> None:
    for number in numbers:
        sink.write([make_message(number)])


def test_jsonl_rotates_full_files(tmp_path):
    path = tmp_path / "r.jsonl"
    line = len(make_message(1).to_text()) + 1
    sink = JsonLines(path, max_bytes=2 * line, keep=2)
    write_records(sink, *range(1, 10))
    files = [path, *(tmp_path / f"r.jsonl.{number}" for number in (1, 2))]
    assert [read_frames(file) for file in files] == [[9], [7, 8], [5, 6]]
    assert len(list(tmp_path.iterdir())) == 3
    sink = JsonLines(path, max_bytes=2 * line, keep=0)
    write_records(sink, 10, 11)
    assert read_frames(path) == [11] and read_frames(tmp_path / "r.jsonl.1") == [7, 8]


@pytest.mark.parametrize("how", ["deleted", "moved", "replaced"])
def test_jsonl_recreates_a_missing_file(tmp_path, how):
    path = tmp_path / "r.jsonl"
    sink = JsonLines(path)
    write_records(sink, 1)
    if how == "deleted":
        path.unlink()
    elif how == "moved":
        path.rename(tmp_path / "r.jsonl.1")
    else:
        (tmp_path / "other").write_text("")
        (tmp_path / "other").rename(path)
    write_records(sink, 2)
    assert read_frames(path) == [2]


@pytest.mark.parametrize(
    ("tail", "repaired"),
    [
        ('{"run":"r","query":"gate","fra', ""),
        ('{"run":"r","detections":[{"class":"a"}', ""),
        ('{"run":"r","query":"gate","frame":7}', '{"run":"r","query":"gate","frame":7}\n'),
        ("other notes", "other notes\n"),
        ("\0\0\0\0", ""),
        ("", ""),
    ],
)
def test_jsonl_repairs_a_truncated_line(tmp_path, tail, repaired):
    path = tmp_path / "r.jsonl"
    before = make_message(1).to_text() + "\n"
    path.write_text(before + tail)
    with collect_notes() as notes:
        write_records(JsonLines(path), 2)
    cut = f"{path}: its last record of {len(tail)} bytes is incomplete and cut off: it was never delivered"
    if "\0" in tail:
        cut = f"{path}: its last {len(tail)} bytes have holes, as after a power loss, and are cut off"
    assert notes == ([cut] if tail and not repaired else [])
    assert path.read_text() == before + repaired + make_message(2).to_text() + "\n"


def test_jsonl_on_full_device_counts_results():
    with running_worker(JsonLinesConfig(path=Path("/dev/full"))) as worker:
        worker.offer(make_message(1))
        until(lambda: worker.to_json()["state"] == "down")
    assert worker.to_json()["undelivered"] == {"disk_full": 1} and worker.to_json()["queued"] == 0
    assert (worker.complaint or "").startswith("jsonl /dev/full: results not delivered: 1 disk_full")


def test_jsonl_on_unread_pipe_writes_whole_lines(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with running_worker(JsonLinesConfig(path=path), items=50) as worker:
        number = 0
        while worker.to_json()["state"] != "down":
            worker.offer(make_message(number, text="x" * 3000))
            number += 1
        row = worker.to_json()
        assert row["undelivered"].keys() <= {"overflow", "blocked"} and row["queued"] > 0
        read: list[bytes] = []
        os.set_blocking(reader, True)
        reading = threading.Thread(target=lambda: read.extend(iter(lambda: os.read(reader, 65536), b"")), daemon=True)
        reading.start()
        until(lambda: worker.to_json()["state"] == "up" and worker.to_json()["queued"] == 0)
    reading.join(10)
    os.close(reader)
    found = [json.loads(line)["frame"] for line in b"".join(read).splitlines()]
    assert found == sorted(set(found)) and len(found) == worker.to_json()["delivered"]


def test_jsonl_check_refuses_unwritable_path_and_leaves_files(tmp_path):
    with pytest.raises(InputError, match="cannot be written"):
        JsonLinesConfig(path=tmp_path).check()
    (tmp_path / "old").write_text("kept")
    for name in ("new", "old"):
        JsonLinesConfig(path=tmp_path / name).check()
    assert [path.name for path in tmp_path.iterdir()] == ["old"] and (tmp_path / "old").read_text() == "kept"


def test_jsonl_rejects_nan_and_continues(tmp_path):
    path = tmp_path / "r.jsonl"
    with running_worker(JsonLinesConfig(path=path)) as worker:
        worker.offer(make_message(1, score=float("nan")))
        worker.offer(make_message(2))
        until(lambda: path.exists() and read_frames(path) == [2])
    assert worker.to_json()["undelivered"] == {"invalid": 1}
