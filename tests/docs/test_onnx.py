"""docs/onnx.md: its blocks run in order in a folder with YOLOX's file and clips of two London cameras."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from gemel.cli import main
from tests.docs.pages import REPOSITORY

PAGE = (REPOSITORY / "docs" / "onnx.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)(?: file=(\S+))?\n(.*?)```", PAGE, re.DOTALL)
CLIPS = {"gate.mp4": "tfl_03601/2019-06-28_03601.mp4", "yard.mp4": "tfl_jc1/jc1.mp4"}
QUERIES = {"gate-traffic", "yard-traffic"}


@pytest.fixture(scope="module")
def folder(real_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder after every block of the page; each command has succeeded."""
    folder = tmp_path_factory.mktemp("onnx")
    for name in ("gate.onnx", "yard.onnx"):
        shutil.copyfile(real_data / "models" / "yolox_nano_416.onnx", folder / name)
    for name, clip in CLIPS.items():
        shutil.copyfile(real_data / "videos" / clip, folder / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for language, file, content in BLOCKS:
            if file:
                (folder / file).write_text(content)
            elif language == "sh":
                for line in content.splitlines():
                    assert main(shlex.split(line)[1:]) == 0, line
    return folder


def test_onnx_page_merges_two_copies_into_half_the_bytes(folder: Path) -> None:
    originals = sum((folder / name).stat().st_size for name in ("gate.onnx", "yard.onnx"))
    assert (folder / "box.safetensors").stat().st_size < 0.6 * originals


def test_onnx_page_box_finds_vehicles_on_both_cameras(folder: Path) -> None:
    records = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    sure = [(one["query"], found) for one in records for found in one["detections"] if found["score"] > 0.5]
    assert {query for query, _ in sure} == QUERIES
    assert {found["class"] for _, found in sure} <= {"car", "bus", "truck"}
    assert all(
        0 <= low < high for _, found in sure for low, high in zip(found["box"][:2], found["box"][2:], strict=True)
    )


def test_onnx_page_reports_both_queries_as_met(folder: Path) -> None:
    report = json.loads((folder / "report" / "report.json").read_text())
    assert {one["query"] for one in report["offline"] if one["met"]} == QUERIES


def test_onnx_page_exports_both_files_with_their_own_outputs(folder: Path) -> None:
    onnx = pytest.importorskip("onnx")
    for query in QUERIES:
        model = onnx.load(str(folder / "onnx" / f"{query}.onnx"), load_external_data=False)
        assert [one.name for one in model.graph.input] == ["images"]
        assert [one.name for one in model.graph.output] == ["output"]
    assert (folder / "onnx" / "weights.bin").stat().st_size < 1.1 * (folder / "gate.onnx").stat().st_size
