"""JSON lines: on real files, full disks and pipes that nobody reads."""

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


def written(sink: JsonLines, *numbers: int) -> None:
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


def test_a_file_that_would_grow_too_large_is_moved_and_the_oldest_go(tmp_path):
    path = tmp_path / "r.jsonl"
    line = len(parcel(1).text()) + 1
    sink = JsonLines(path, max_bytes=2 * line, keep=2)
    written(sink, *range(1, 10))
    assert frames(path) == [9] and frames(tmp_path / "r.jsonl.1") == [7, 8] and frames(tmp_path / "r.jsonl.2") == [5, 6]
    assert len(list(tmp_path.iterdir())) == 3
    sink = JsonLines(path, max_bytes=2 * line, keep=0)
    written(sink, 10, 11)
    assert frames(path) == [11] and frames(tmp_path / "r.jsonl.1") == [7, 8]


@pytest.mark.parametrize("how", ["deleted", "moved", "replaced"])
def test_a_file_that_is_gone_is_begun_anew(tmp_path, how):
    path = tmp_path / "r.jsonl"
    sink = JsonLines(path)
    written(sink, 1)
    if how == "deleted":
        path.unlink()
    elif how == "moved":
        path.rename(tmp_path / "r.jsonl.1")
    else:
        (tmp_path / "other").write_text("")
        (tmp_path / "other").rename(path)
    written(sink, 2)
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
def test_a_last_line_that_was_cut_short_merges_with_nothing(tmp_path, torn, left):
    path = tmp_path / "r.jsonl"
    before = parcel(1).text() + "\n"
    path.write_text(before + torn)
    written(JsonLines(path), 2)
    assert path.read_text() == before + left + parcel(2).text() + "\n"


def test_after_sighup_lines_go_to_the_file_of_that_name(tmp_path):
    path, other = tmp_path / "r.jsonl", tmp_path / "link"
    other.symlink_to(path)
    with courier(JsonLinesConfig(other)) as one:
        one.offer(parcel(1))
        until(lambda: path.exists() and frames(path) == [1])
        descriptors = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            one.reopen()
        one.offer(parcel(2))
        until(lambda: frames(path) == [1, 2])
        assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_a_full_disk_is_counted_and_once_it_has_room_all_that_was_kept_is_delivered(small_disk):
    filler, path = small_disk / "filler", small_disk / "r.jsonl"
    with courier(JsonLinesConfig(path), items=5) as one:
        one.offer(parcel(0))
        until(lambda: path.exists() and frames(path) == [0])
        with open(filler, "wb", buffering=0) as file, pytest.raises(OSError):
            while True:
                file.write(bytes(1024))
        sent = 1
        while one.to_json()["state"] == "up":
            one.offer(parcel(sent, text="x" * 500))
            sent += 1
            until(lambda: one.to_json()["queued"] == 0 or one.to_json()["state"] == "down")
        for number in range(sent, sent + 10):
            one.offer(parcel(number))
        told = one.to_json()
        assert told["queued"] <= 6 and told["undelivered"]["disk_full"] >= 5 and "No space left" in told["trouble"]
        filler.unlink()
        until(lambda: one.to_json()["state"] == "up" and one.to_json()["queued"] == 0)
        assert one.complaint is None
    kept = frames(path)
    assert kept[-5:] == [sent + 5, sent + 6, sent + 7, sent + 8, sent + 9] and kept == sorted(set(kept))
    told = one.to_json()
    assert told["delivered"] == len(kept) and told["delivered"] + sum(told["undelivered"].values()) == sent + 10


def test_a_device_that_is_always_full_ends_with_all_counted_and_a_complaint():
    with courier(JsonLinesConfig(Path("/dev/full"))) as one:
        one.offer(parcel(1))
        until(lambda: one.to_json()["state"] == "down")
    assert one.to_json()["undelivered"] == {"disk_full": 1} and one.to_json()["queued"] == 0
    assert (one.complaint or "").startswith("jsonl /dev/full: results not delivered: 1 disk_full")


def test_a_pipe_that_nobody_reads_holds_nobody_up_and_no_line_is_torn(tmp_path):
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


def test_what_can_never_be_written_is_refused_before_anything_is_made(tmp_path):
    for path in (tmp_path / "no" / "where", tmp_path):
        with pytest.raises(InputError, match="cannot be written"):
            JsonLinesConfig(path).check()
    JsonLinesConfig(tmp_path / "new").check()
    (tmp_path / "old").write_text("kept")
    JsonLinesConfig(tmp_path / "old").check()
    assert [path.name for path in tmp_path.iterdir()] == ["old"] and (tmp_path / "old").read_text() == "kept"


def test_a_number_that_json_cannot_say_is_given_up_and_the_next_result_comes(tmp_path):
    path = tmp_path / "r.jsonl"
    with courier(JsonLinesConfig(path)) as one:
        one.offer(parcel(1, score=float("nan")))
        one.offer(parcel(2))
        until(lambda: path.exists() and frames(path) == [2])
    assert one.to_json()["undelivered"] == {"invalid": 1}
