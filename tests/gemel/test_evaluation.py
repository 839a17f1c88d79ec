"""`gemel eval`: the rows of its report, equal memory for both arms, labels that cannot be scored."""

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gemel.cli import main
from gemel.evaluation import EvalOptions, check_objects, evaluate, score_query
from gemel.gating import gate_frames
from gemel.models.bundle import open_bundle
from gemel.models.data import Split
from gemel.models.errors import InputError
from gemel.models.notes import collect_notes
from gemel.models.predictions import BoxLabels, ClassPrediction, DetectionPrediction
from gemel.models.workload import Query
from gemel.profiler import profile_bundle
from gemel.report.document import MERGED, ORIGINALS, read_report
from gemel.report.page import render_report
from gemel.stream_eval import Footage, QueryTest
from gemel.text import size
from tests.fake_gpu import fake_gpu

DETECTION = Query(
    "q", "cam", "detection", ("car", "bus"), "m", {}, 32, None, None, 5, 100, None, 0.0, 1, Path("data"), 0.95
)
HERE = (5.0, 5.0, 30.0, 30.0)


def run_evaluation(tiny, out, device="jetson-nano", progress=lambda *_, **__: None, **options):
    options = EvalOptions(device, **{"seeds": 1, **options})
    return evaluate(tiny / "tiny.safetensors", tiny / "workload.yaml", out, options, progress)


@pytest.fixture(scope="module")
def report(tiny):
    return run_evaluation(tiny, tiny / "report", seeds=2)


@pytest.fixture(scope="module")
def page(tiny, report):
    return (tiny / "report" / "report.html").read_text()


def test_motion_gating_reports_what_it_saves_and_costs(tiny, tmp_path):
    report = run_evaluation(tiny, tmp_path / "report", motion_gating=True)
    assert [row.query for row in report.gating] == report.queries
    for row in report.gating:
        assert 0 < row.run <= row.frames and row.still_fraction == 1 - row.run / row.frames
        assert row.run < row.frames or row.gated == row.ungated
    assert "Motion gating" in (tmp_path / "report" / "report.html").read_text()
    assert "--motion-gating" in report.commands[0]


def test_gated_frames_get_the_answer_of_the_last_frame_that_moved():
    dark, lit = np.zeros((90, 160, 3), np.uint8), np.zeros((90, 160, 3), np.uint8)
    lit[30:60, 60:100] = 200
    frames = [dark, dark, lit, lit, dark, lit]
    footage = Footage(("a",) * 5 + ("b",), (0.0, 0.2, 0.4, 0.6, 0.8, 0.0), None)
    assert gate_frames(footage, frames) == [(0, 0), (1, 0), (2, 2), (3, 2), (4, 4), (5, 5)]


def test_report_has_both_arms_at_every_memory(report, tiny):
    rows = {(row.arm, row.memory, row.query) for row in report.streaming}
    assert len(rows) == len(report.streaming) == 2 * 3 * 2
    assert {row.memory for row in report.streaming} == {"min", "50%", "all"}
    for memory in ("min", "50%", "all"):
        assert len({row.memory_bytes for row in report.streaming if row.memory == memory}) == 1
    assert all(row.age_p50_ms <= row.age_p95_ms <= row.age_p99_ms for row in report.streaming)
    for row in report.ledger:
        assert row.received == row.processed + sum(row.dropped.values()) + row.failed + row.pending > 0
    document = json.loads((tiny / "report" / "report.json").read_text())
    assert document == report.to_json() and {"offline", "streaming", "ledger"} <= document.keys()


def test_report_bytes_equal_the_manifest(report, tiny):
    counts, manifest = report.bytes, open_bundle(tiny / "tiny.safetensors").manifest
    assert counts.resident_after == counts.after == manifest.bytes.after < counts.before <= counts.resident_before
    assert sum(row.private + row.shared_part for row in counts.queries) == pytest.approx(counts.after)


def test_original_near_chance_is_no_evidence(report):
    weak = [row for row in report.offline if not row.worth]
    assert weak, "random weights are near chance"
    assert all(any(row.query in line and "no evidence" in line for line in report.limits) for row in weak)


def test_page_is_self_contained(tiny, report, page):
    assert sorted(path.name for path in (tiny / "report").glob("[!.]*")) == ["report.html", "report.json"]
    assert not re.search(r"""(src|href)\s*=\s*["']?\s*(https?:)?//|@import|url\(\s*["']?(?!data:)""", page)
    assert "<script" not in page and "<link" not in page
    photos = re.findall(r"data:image/jpeg;base64,([\w+/=]+)", page)
    read = read_report(tiny / "report" / "report.json")
    assert len(photos) == len(report.examples) == 12
    assert read == report and render_report(read, photos) == page, "made of report.json and the photos alone"


def test_report_holds_its_command_and_versions(report, tiny):
    (command,) = report.commands
    assert command.startswith(f"gemel eval {tiny}/tiny.safetensors {tiny}/workload.yaml -o {tiny}/report")
    assert command.endswith("--memory 50% --seeds 2") and {"python", "torch"} <= report.versions.keys()
    row = report.offline[0]
    assert [one.name for one in row.classes] == ["empty", "busy"]
    assert sum(one.merged for one in row.classes) / 2 == pytest.approx(row.merged)


def test_bundle_of_another_workload_is_refused(tiny, tmp_path):
    other = tmp_path / "other.yaml"
    other.write_text((tiny / "workload.yaml").read_text().replace("id: b", "id: c"))
    with pytest.raises(InputError, match="does not hold the queries"):
        evaluate(tiny / "tiny.safetensors", other, tmp_path / "report")
    other.write_text((tiny / "workload.yaml").read_text().replace("input_size: 32", "input_size: 64"))
    with pytest.raises(InputError, match="input_size: query a differs"):
        evaluate(tiny / "tiny.safetensors", other, tmp_path / "report")
    assert not (tmp_path / "report").exists()


def test_missing_test_data_is_refused_in_one_line(tiny, tmp_path, capsys):
    moved, text = tmp_path / "workload.yaml", (tiny / "workload.yaml").read_text()
    moved.write_text(text.replace("weights/", f"{tiny}/weights/").replace("data: data", "data: none"))
    assert main(["eval", str(tiny / "tiny.safetensors"), str(moved), "-o", str(tmp_path / "report")]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("gemel: ") and "none" in error and "data" in error
    assert not (tmp_path / "report" / "report.json").exists()


def test_requested_memory_becomes_the_headline(tiny, tmp_path):
    events = []
    made = run_evaluation(tiny, tmp_path, memory="512MiB", progress=lambda *words, **fields: events.append(fields))
    assert (made.headline.memory, made.headline.memory_bytes) == ("512MiB", 512 * 2**20)
    assert {one.memory for one in made.memory_settings} == {"min", "50%", "all", "512MiB"}
    beside = size(made.base_bytes)
    reason = f"512.0 MiB of device memory for weights and workspace, beside the {beside} of the process itself: as requ"
    assert reason in (tmp_path / "report.html").read_text()
    assert events[0]["names"] == ["evaluating each query on test", "simulating the streams", "writing the report"]


def test_evaluation_on_a_gpu_equals_the_cpu(tiny, tmp_path, monkeypatch, report):
    with fake_gpu(monkeypatch) as mixed:
        assert run_evaluation(tiny, tmp_path).offline == report.offline
    assert not mixed


def test_memory_below_the_largest_query_is_refused(tiny, tmp_path):
    with pytest.raises(InputError, match="too little"):
        run_evaluation(tiny, tmp_path / "report", memory="1MiB")
    assert not (tmp_path / "report").exists()


def test_output_that_cannot_be_a_folder_is_refused(tiny, tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "report"):
        with pytest.raises(InputError, match="--out: exists and is no folder"):
            run_evaluation(tiny, out)


def test_failing_write_leaves_the_older_report_whole(tiny, tmp_path):
    (tmp_path / "report.json").write_text("older")
    (tmp_path / "report.html").mkdir()
    with pytest.raises(InputError, match=r"report\.html"):
        run_evaluation(tiny, tmp_path)
    assert (tmp_path / "report.json").read_text() == "older"


def test_simulate_of_bundle_and_workload_agree_on_memory(tiny, capsys):
    found = []
    for source in ("tiny.safetensors", "workload.yaml"):
        assert main(["simulate", str(tiny / source), "--memory", "min", "--duration", "5", "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    merged, originals = found
    assert {"id", "received", "processed", "late", "dropped", "age_p95_ms"} <= merged["queries"][0].keys()
    assert merged["memory_bytes"] == originals["memory_bytes"] and merged["bytes_moved"] < originals["bytes_moved"]


def test_bundle_verify_refuses_a_flipped_bit(tiny, tmp_path, capsys):
    assert main(["bundle", "verify", str(tiny / "tiny.safetensors"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"ok": True, "problems": [], "unchecked": []}
    data = bytearray((tiny / "tiny.safetensors").read_bytes())
    data[random.Random(0).randrange(len(data) // 2, len(data))] ^= 1
    (tmp_path / "damaged").write_bytes(data)
    assert main(["bundle", "verify", str(tmp_path / "damaged"), "--json"]) == 1
    refused = json.loads(capsys.readouterr().out)
    assert refused["ok"] is False and len(refused["problems"]) == 1


def test_measured_costs_come_from_the_profile(tiny, tmp_path):
    with pytest.raises(InputError, match="never measured"):
        run_evaluation(tiny, tmp_path, "measured")
    found = profile_bundle(tiny / "tiny.safetensors", "cpu", rounds=1, engine="torch").profile
    made = run_evaluation(tiny, tmp_path, "measured")
    assert not made.device.modelled and made.device.name == "measured"
    runs = {(row.arm, row.query): row.run_ms for row in made.costs}
    assert runs["merged", "a"] == runs["originals", "a"] == pytest.approx(1000 * found.queries["a"].batches[0].run_s)
    (tiny / "tiny.safetensors.profile.json").unlink()


def label_boxes(*boxes, name="car"):
    return BoxLabels((name,) * len(boxes), boxes)


def test_labels_without_objects_are_refused():
    with pytest.raises(
        InputError, match=r"data: no frame of the test split shows car or bus .query q.: nothing to score"
    ):
        check_objects(DETECTION, [BoxLabels(), BoxLabels()])


@pytest.fixture
def scored_query():
    """Three frames with labels and the predictions of both models."""
    frames = [np.full((40, 60, 3), 90, np.uint8)] * 3
    crowd = BoxLabels(crowds=label_boxes((0.0, 0.0, 60.0, 40.0)))
    labels = (label_boxes(HERE), crowd, BoxLabels(("bus", "car"), (HERE, (40.0, 5.0, 55.0, 20.0))))
    split = Split("test", frames, labels, ("u", "u", "v"), (0.0, 1.0, 0.0))
    good = [DetectionPrediction(one.classes, (0.9,) * len(one.boxes), one.boxes) for one in labels]
    worse = [good[0], DetectionPrediction(("car",), (0.4,), (HERE,)), DetectionPrediction(("bus",), (0.8,), (HERE,))]
    footage = Footage(split.units, split.times_s, 5)
    return QueryTest(DETECTION, footage, labels, 0.5, {ORIGINALS: good, MERGED: worse}), split


def test_scored_detections_have_errors_by_type_and_map(scored_query):
    test, split = scored_query
    found = score_query(DETECTION, split, test.predictions, test.threshold, original_bytes=1)
    row = found.row
    assert row.map_original == 1.0 > (row.map_merged or 0.0) and row.errors is not None
    assert not any(one.count for one in row.errors["original"].values())
    assert {kind: one.count for kind, one in row.errors["merged"].items() if one.count} == {"missed": 1}
    assert found.examples[0].lost > 0 and len(found.photos) == 3


def test_classes_in_another_order_are_the_remedy_of_an_evaluation_too():
    query = replace(DETECTION, task="classification", classes=("closed", "open"))
    labels = ("closed", "open") * 10
    frames = list(np.random.default_rng(0).integers(0, 255, (len(labels), 32, 32, 3), np.uint8))
    units = tuple(f"clip{index // 2}" for index in range(len(labels)))
    split = Split("test", frames, labels, units, tuple(float(index) for index in range(len(labels))))
    answers = [ClassPrediction("closed" if one == "open" else "open", 0.9, (0.1, 0.9)) for one in labels]
    with collect_notes() as notes:
        score_query(query, split, {ORIGINALS: answers, MERGED: answers}, 0.5, original_bytes=1)
    order, evidence = notes
    assert "named open, closed, in this order" in order
    assert "no evidence: its original reaches only 0.00" in evidence
    assert evidence.endswith("list `classes` in this order, or check the weights")
