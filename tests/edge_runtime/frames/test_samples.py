"""Samples: the model's input to the pixel with the answer to it; the spool that holds them is bounded and private."""

from __future__ import annotations

import json
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest

from gemel.edge_runtime.frames import samples
from gemel.edge_runtime.frames.queues import Frame
from gemel.edge_runtime.frames.results import RunIdentity, result_record
from gemel.edge_runtime.frames.samples import (
    DRIFT_FILE,
    MAX_QUEUED,
    MIN_FREE_FRACTION,
    NO_ROOM,
    Spool,
    expected_agreement,
    read_head,
    read_sample,
    sample_bytes,
)
from gemel.edge_runtime.life.config import SpoolConfig
from gemel.edge_runtime.sinks.base import ResultMessage
from gemel.models.errors import InputError
from gemel.models.predictions import ClassPrediction, DetectionPrediction
from tests.edge_runtime.tiny import change_head, picture, query

TIMEOUT_S = 30.0
IMAGE = picture(3, 200, 120)
ROI = (10.0, 5.0, 110.0, 85.0)
DETECTED = DetectionPrediction(("a", "b"), (0.9, 0.4), ((11.0, 6.0, 60.5, 40.0), (20.0, 20.0, 30.0, 30.0)))
DETECTOR = query("gate", "left", task="detection", roi=ROI, input_size=32, min_score=0.2, threshold=0.3)
CLASSIFIERS = {name: query(name, "left") for name in ("gate", "yard")}
REPORT = {
    "format": 1, "checked_at": 1.7e9, "bundle": "ab" * 6,
    "queries": [{"id": "gate", "frames": 50, "ratio": 0.8, "target": 0.95, "verdict": "below",
                 "reverted": True}],
}  # fmt: skip


def write_sample(path: Path, asked, prediction) -> Path:
    record = result_record(asked, Frame(7, 5.0, 1.7e9, IMAGE), prediction, 5.01, RunIdentity("ab" * 32, "0011"))
    path.write_bytes(sample_bytes(record, IMAGE, asked))
    return path


@pytest.fixture
def sample_file(tmp_path) -> Path:
    """A sample of a detector that looks at a part of the frame."""
    return write_sample(tmp_path / "a.png", DETECTOR, DETECTED)


def test_sample_picture_is_the_model_input(sample_file):
    sample = read_sample(sample_file)
    resized = DETECTOR.preprocess.resize_frame(IMAGE[5:85, 10:110])
    assert np.array_equal(sample.picture, resized.transpose(1, 2, 0))
    assert np.array_equal(DETECTOR.preprocess.resize_frame(sample.picture), resized)
    opened = cv2.imread(str(sample_file))  # as any viewer does
    assert opened is not None and np.array_equal(opened[..., ::-1], sample.picture)


def test_sample_head_holds_the_answer(sample_file, tmp_path):
    head = read_head(sample_file)
    assert (head.query, head.camera, head.frame, head.bundle) == ("gate", "left", 7, "ab" * 6)
    assert (head.size, head.roi, head.threshold, head.captured_at) == ([100, 80], list(ROI), 0.3, 1.7e9)
    assert head.label is None and head.detections is not None
    detections = zip(DETECTED.classes, DETECTED.scores, DETECTED.boxes, strict=True)
    assert [(one.name, one.score, tuple(one.box)) for one in head.detections] == list(detections)
    head = read_head(write_sample(tmp_path / "b.png", CLASSIFIERS["gate"], ClassPrediction("b", 0.7, (0.3, 0.7))))
    assert (head.label, head.score, head.detections, head.roi, head.size) == ("b", 0.7, None, None, [200, 120])


@pytest.mark.parametrize(("evidence", "expected"), [
    (None, 1.0), ({"ratio": 0.98}, 1.0), ({"ratio": 0.98, "agreement": 0.882}, 0.9),
    ({"ratio": 0.97, "agreement": 0.97}, 1.0), ({"ratio": 0.5, "agreement": 0.9}, 1.0),
    ({"ratio": 1.0, "agreement": 0.0}, 0.01), ({"ratio": None, "agreement": 0.9}, 1.0),
    ({"ratio": 0.0, "agreement": 0.9}, 1.0), ({"ratio": 1.0, "agreement": "x"}, 1.0),
])  # fmt: skip
def test_expected_agreement_follows_evidence(evidence, expected):
    assert expected_agreement(query("gate", "left", evidence=evidence)) == pytest.approx(expected)


@pytest.mark.parametrize(("damage", "text"), [
    (lambda data: b"", "is no sample"),
    (lambda data: data[:60], "is no sample"),
    (lambda data: data[:50] + b"!" + data[51:], "is no sample"),
    (lambda data: data[:33] + data[33 + 12 + int.from_bytes(data[33:37], "big") :], "no PNG picture with a text"),
    (lambda data: change_head(data, "{", "[["), "is no sample"),
    (lambda data: change_head(data, '"frame":7', '"frame":7,"frame":8'), "occurs twice"),
    (lambda data: change_head(data, '"frame":7', '"frame":-7'), "frame"),
    (lambda data: change_head(data, '"frame":7', '"frame":7,"odd":1'), "unknown key"),
    (lambda data: change_head(data, '"score":0.9', '"score":NaN'), "NaN"),
    (lambda data: change_head(data, '"gate"', '"../gate"'), "query"),
    (lambda data: change_head(data, '"detections"', '"label":"a","score":0.5,"detections"'), "has no answer"),
])  # fmt: skip
def test_read_sample_refuses_damage(sample_file, damage, text):
    sample_file.write_bytes(damage(sample_file.read_bytes()))
    with pytest.raises(InputError, match=text) as error:
        read_sample(sample_file)
    assert str(error.value).startswith(str(sample_file)) and "\n" not in str(error.value)


def test_read_sample_refuses_truncation(sample_file):
    sample_file.write_bytes(sample_file.read_bytes()[:-40])
    assert read_head(sample_file).frame == 7
    with pytest.raises(InputError, match="not an image"):
        read_sample(sample_file)


def wait_until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@contextmanager
def running_spool(folder: Path, max_bytes: int = 2**20) -> Iterator[Spool]:
    """A spool in which every answer is due."""
    spool = Spool(SpoolConfig(folder, max_bytes, 0.0), CLASSIFIERS)
    spool.start()
    try:
        yield spool
    finally:
        spool.stop()


def offer(spool: Spool, *frames: int, name: str = "gate", waits: bool = True) -> None:
    """A result of each of these frames, with a wait until it is written or counted as not."""
    for frame in frames:
        before = spool.samples + spool.unsampled.total()
        record = {"run": "r", "query": name, "camera": "left", "frame": frame, "captured_at": 1.7e9 + frame,
                  "bundle": "ab" * 6, "label": "a", "score": 0.5}  # fmt: skip
        spool.offer(ResultMessage(record, picture(frame)))
        if waits:
            wait_until(lambda before=before: spool.samples + spool.unsampled.total() > before)


def test_spool_files_are_private(tmp_path):
    with running_spool(tmp_path) as spool:
        offer(spool, 1)
        offer(spool, 2, name="yard")
    folder = tmp_path / "samples"
    paths = sorted(folder.iterdir())
    assert [read_sample(path).head.query for path in paths] == ["gate", "yard"]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths} == {0o600}
    assert spool.to_json() == {"samples": 2, "unsampled": {}, "bytes": sum(path.stat().st_size for path in paths)}


def test_spool_evicts_oldest_across_restarts(tmp_path):
    folder = tmp_path / "samples"

    def total_bytes() -> int:
        return sum(path.stat().st_size for path in folder.iterdir())

    with running_spool(tmp_path) as spool:
        offer(spool, *range(4))
        max_bytes = total_bytes()
    (folder / ".torn.png..1234.tmp").write_bytes(bytes(100))  # left by a killed process
    with running_spool(tmp_path, max_bytes) as spool:
        offer(spool, *range(4, 12))
        assert total_bytes() == spool.to_json()["bytes"] <= max_bytes
    frames = [read_sample(path).head.frame for path in sorted(folder.iterdir())]
    assert frames == list(range(frames[0], 12)) and 2 <= len(frames) <= 4
    (tmp_path / "small").mkdir()
    with running_spool(tmp_path / "small", 100) as spool:
        offer(spool, 1)
        assert spool.to_json() == {"samples": 0, "unsampled": {"too_large": 1}, "bytes": 0}


def test_spool_unwritable_is_logged_once_and_recovers(tmp_path, caplog):
    (tmp_path / "samples").write_text("in the way")
    with caplog.at_level(logging.INFO), running_spool(tmp_path) as spool:
        offer(spool, 1, 2, 3)
        assert spool.to_json() == {"samples": 0, "unsampled": {"unwritable": 3}, "bytes": 0}
        (tmp_path / "samples").unlink()
        offer(spool, 4)
        assert spool.samples == 1
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2 and "samples" in lines[0] and lines[1] == "spool: samples are written again"


def test_spool_gives_way_on_a_small_disk(tmp_path, monkeypatch):
    folder, room = tmp_path / "samples", 2**20

    def disk_usage(path: Path) -> SimpleNamespace:
        used = sum(sample.stat().st_size for sample in folder.glob("*.png"))
        return SimpleNamespace(total=2**20, free=room - used)

    monkeypatch.setattr(samples.shutil, "disk_usage", disk_usage)
    with running_spool(tmp_path) as spool:
        offer(spool, 0, 1, 2)
    sizes = [path.stat().st_size for path in sorted(folder.iterdir())]
    assert len(sizes) == 3 and spool.unsampled == {}
    room = int(MIN_FREE_FRACTION * 2**20) + 2 * max(sizes) + min(sizes) // 2
    with running_spool(tmp_path) as spool:
        offer(spool, 3)
    frames = [read_sample(path).head.frame for path in sorted(folder.iterdir())]
    assert frames == [2, 3] and spool.samples == 1, "the oldest went first"
    room = 0
    with running_spool(tmp_path) as spool:
        offer(spool, 4)
    assert spool.unsampled == {NO_ROOM: 1} and not list(folder.iterdir())


def test_spool_on_hanging_disk_blocks_no_caller(tmp_path, monkeypatch):
    hanging, freed = threading.Event(), threading.Event()

    def hang(*given):
        hanging.set()
        assert freed.wait(30)
        return b"png"

    monkeypatch.setattr(samples, "sample_bytes", hang)
    spool = Spool(SpoolConfig(tmp_path, 2**20, 0.0), CLASSIFIERS)
    spool.start()
    offer(spool, 0, waits=False)
    assert hanging.wait(30)
    offer(spool, *range(1, 2 * MAX_QUEUED), waits=False)
    assert spool.unsampled["busy"] == MAX_QUEUED - 1
    freed.set()
    spool.stop()
    assert spool.samples == MAX_QUEUED + 1


def test_spool_reads_drift_report(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(samples, "POLL_INTERVAL_S", 0.01)

    def replace_report(report: dict[str, Any]) -> None:
        (tmp_path / "new").write_text(json.dumps(report))
        os.replace(tmp_path / "new", tmp_path / DRIFT_FILE)

    with running_spool(tmp_path) as spool:
        replace_report(REPORT)
        wait_until(lambda: spool.drift is not None)
        assert spool.drift is not None and spool.drift.queries[0].ratio == 0.8 and spool.drift.checked_at == 1.7e9
        replace_report({**REPORT, "queries": [{"id": "gate"}]})
        wait_until(lambda: spool.drift is None and caplog.records)
        assert DRIFT_FILE in caplog.text and len(caplog.records) == 1


def test_spool_of_an_absurd_clock_names_samples_by_the_time_since_the_start(tmp_path):
    """A clock before 1970, as without a battery, and one that was set later: every sample reads, the oldest first."""
    record = {"run": "r", "query": "gate", "camera": "left", "bundle": "ab" * 6, "label": "a", "score": 0.5}
    times = (-6e7, -5.9e7, 12.0, 1.7e9, 1.7e9 + 1)
    with running_spool(tmp_path) as spool:
        for frame, captured_at in enumerate(times):
            spool.offer(ResultMessage({**record, "frame": frame, "captured_at": captured_at}, picture(frame)))
            wait_until(lambda frame=frame: spool.samples > frame)
    paths = sorted((tmp_path / "samples").iterdir())
    heads = [read_head(path) for path in paths]
    assert [head.frame for head in heads] == [0, 1, 2, 3, 4]
    assert 0 <= heads[0].captured_at <= heads[2].captured_at < TIMEOUT_S and heads[3].captured_at == 1.7e9
