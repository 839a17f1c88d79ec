"""Detectors on cameras that they were not trained on: whose frames are in which split."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.data import elsewhere, prepare
from benchmarks.data.junction import GAP_FRAMES, HUMAN_CLIPS, HUMAN_STEP
from gemel.models.data import load_split
from gemel.models.workload import load_workload

CAMERAS = {camera: [f"{camera}-{number}" for number in range(100)] for camera in HUMAN_CLIPS}


@pytest.mark.parametrize("left_out", HUMAN_CLIPS)
def test_the_camera_left_out_is_tested_and_nothing_of_it_is_learnt(left_out: str) -> None:
    found = elsewhere.dealt(CAMERAS, left_out)
    assert found["test"] == {left_out: CAMERAS[left_out]}
    for camera in set(CAMERAS) - {left_out}:
        gap = GAP_FRAMES // HUMAN_STEP
        assert found["train"][camera] == CAMERAS[camera][:80] and found["val"][camera] == CAMERAS[camera][80 + gap :]
    assert left_out not in found["train"] and left_out not in found["val"]


def test_the_workload_has_a_detector_for_each_camera(repository: Path) -> None:
    queries = load_workload(repository / "benchmarks" / "workloads" / "elsewhere.yaml").queries
    assert [(query.id, query.camera) for query in queries] == [(f"without-{c}", f"c{c}") for c in HUMAN_CLIPS]


def test_a_missing_clip_names_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "MANIFEST.json").write_text("{}")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / elsewhere.INIT).write_bytes(b"x")
    assert prepare.main(["elsewhere", "--data", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "2019-06-28_03601.mp4: missing" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.real
def test_real_clips_are_dealt_by_camera(real_data: Path, tmp_path: Path) -> None:
    counts = prepare.prepare("elsewhere", real_data, tmp_path)
    assert all(one["test"]["cameras"] == 1 and one["train"]["cameras"] == 2 for one in counts.values())
    for query in load_workload(tmp_path / "workload.yaml").queries:
        own = query.camera.removeprefix("c")
        assert set(load_split(query, "test").units) == {own}
        assert set(load_split(query, "train").units) == set(load_split(query, "val").units) == set(HUMAN_CLIPS) - {own}
