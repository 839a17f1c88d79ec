"""JSON lines on real files, full disks and pipes without a reader."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_runtime.sinks.jsonl import JsonLines, JsonLinesConfig
from models.errors import InputError
from tests.edge_runtime.sinks.messages import courier, parcel, until


def frames(path: Path) -> list[int]:
    return [json.loads(line)["frame"] for line in path.read_text().splitlines()]


def write_records(sink: JsonLines, *numbers: int) -> None:
    for number in numbers:
        sink.write([parcel(number)])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 64 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"nothing can be mounted here: {mounted.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_jsonl_rotates_full_files(tmp_path):
    path = tmp_path / "r.jsonl"
    line = len(parcel(1).to_text()) + 1
    sink = JsonLines(path, max_bytes=2 * line, keep=2)
    write_records(sink, *range(1, 10))
    assert frames(path) == [9] and frames(tmp_path / "r.jsonl.1") == [7, 8] and frames(tmp_path / "r.jsonl.2") == [5, 6]
    assert len(list(tmp_path.iterdir())) == 3
    sink = JsonLines(path, max_bytes=2 * line, keep=0)
    write_records(sink, 10, 11)
    assert frames(path) == [11] and frames(tmp_path / "r.jsonl.1") == [7, 8]


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
    assert frames(path) == [2]


@pytest.mark.parametrize(
    ("torn", "left"),
    [
        ('{"run":"r","query":"gate","fra', ""),
        ('{"run":"r","detections":[{"class":"a"}', ""),
        ('{"run":"r","query":"gate","frame":7}', '{"run":"r","query":"gate","frame":7}\n'),
        ("notes of somebody", "notes of somebody\n"),
        ("\0\0\0\0", ""),
        ("", ""),
    ],
)
def test_jsonl_repairs_a_truncated_line(tmp_path, torn, left):
    path = tmp_path / "r.jsonl"
    before = parcel(1).to_text() + "\n"
    path.write_text(before + torn)
    write_records(JsonLines(path), 2)
    assert path.read_text() == before + left + parcel(2).to_text() + "\n"


def test_jsonl_on_full_device_counts_and_complains():
    with courier(JsonLinesConfig(Path("/dev/full"))) as one:
        one.offer(parcel(1))
        until(lambda: one.to_json()["state"] == "down")
    assert one.to_json()["undelivered"] == {"disk_full": 1} and one.to_json()["queued"] == 0
    assert (one.complaint or "").startswith("jsonl /dev/full: results not delivered: 1 disk_full")


def test_jsonl_on_unread_pipe_tears_no_line(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with courier(JsonLinesConfig(path), items=50) as one:
        number = 0
        while one.to_json()["state"] != "down":
            one.offer(parcel(number, text="x" * 3000))
            number += 1
        told = one.to_json()
        assert told["undelivered"].keys() <= {"overflow", "blocked"} and told["queued"] > 0
        read: list[bytes] = []
        os.set_blocking(reader, True)
        taking = threading.Thread(target=lambda: read.extend(iter(lambda: os.read(reader, 65536), b"")), daemon=True)
        taking.start()
        until(lambda: one.to_json()["state"] == "up" and one.to_json()["queued"] == 0)
    taking.join(10)
    os.close(reader)
    found = [json.loads(line)["frame"] for line in b"".join(read).splitlines()]
    assert found == sorted(set(found)) and len(found) == one.to_json()["delivered"]


def test_jsonl_check_refuses_unwritable_path(tmp_path):
    for path in (tmp_path / "no" / "where", tmp_path):
        with pytest.raises(InputError, match="cannot be written"):
            JsonLinesConfig(path).check()
    JsonLinesConfig(tmp_path / "new").check()
    (tmp_path / "old").write_text("kept")
    JsonLinesConfig(tmp_path / "old").check()
    assert [path.name for path in tmp_path.iterdir()] == ["old"] and (tmp_path / "old").read_text() == "kept"


def test_jsonl_rejects_nan_and_continues(tmp_path):
    path = tmp_path / "r.jsonl"
    with courier(JsonLinesConfig(path)) as one:
        one.offer(parcel(1, score=float("nan")))
        one.offer(parcel(2))
        until(lambda: path.exists() and frames(path) == [2])
    assert one.to_json()["undelivered"] == {"invalid": 1}
