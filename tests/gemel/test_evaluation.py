"""`gemel eval`: the keys of its report, equal memory for both arms, labels that cannot be scored, COCO export."""

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest

from gemel.cli import main
from gemel.coco_export import check_export_folder, export_coco
from gemel.evaluation import EvalOptions, check_boxes, evaluate
from gemel.realtime import paste_into_frame
from gemel.report.document import MERGED, ORIGINALS, read_report
from gemel.report.page import render_report
from gemel.stream_eval import Footage, QueryTest
from models.bundle import open_bundle
from models.data import Split
from models.errors import InputError
from models.metrics import average_precision, overlaps_of
from models.predictions import BoxLabels, DetectionPrediction
from models.preprocess import crop
from models.workload import Query
from tests.fake_gpu import fake_gpu

DETECTION = Query(
    "q", "cam", "detection", ("car", "bus"), "m", {}, 32, None, None, 5, 100, None, 0.0, 1, Path("data"), 0.95
)
HERE = (5.0, 5.0, 30.0, 30.0)


@pytest.fixture(scope="module")
def report(tiny):
    return evaluate(tiny / "tiny.safetensors", tiny / "workload.yaml", tiny / "report", EvalOptions(seeds=2))


@pytest.fixture(scope="module")
def eval_report(report):
    """The report as JSON."""
    return report.to_json()


def test_report_has_every_documented_key(eval_report, tiny):
    assert {"offline", "streaming", "ledger"} <= set(eval_report)
    keys = {"arm", "memory", "memory_bytes", "query", "metric", "accuracy", "age_p95_ms", "spread"}
    keys |= {"age_p50_ms", "age_p99_ms"}
    assert all(keys <= set(row) for row in eval_report["streaming"])
    arms = {(row["arm"], row["memory"], row["query"]) for row in eval_report["streaming"]}
    assert len(arms) == len(eval_report["streaming"]) == 2 * 3 * 2
    assert json.loads((tiny / "report" / "report.json").read_text()) == eval_report


def test_arms_get_equal_memory_and_the_ledger_adds_up(eval_report):
    for memory in ("min", "50%", "all"):
        rows = [row for row in eval_report["streaming"] if row["memory"] == memory]
        assert len({row["memory_bytes"] for row in rows}) == 1
    for row in eval_report["ledger"]:
        settled = row["processed"] + sum(row["dropped"].values()) + row["failed"] + row["pending"]
        assert row["received"] == settled > 0


def test_measured_bytes_equal_the_manifest(eval_report, tiny):
    counts, manifest = eval_report["bytes"], open_bundle(tiny / "tiny.safetensors").manifest
    assert counts["after"] == manifest.bytes.after < counts["before"]
    assert counts["resident_after"] == counts["after"]
    assert counts["resident_before"] >= counts["before"]
    parts = sum(row["private"] + row["shared_part"] for row in counts["queries"])
    assert parts == pytest.approx(counts["after"])


def test_original_near_chance_is_no_evidence(eval_report):
    weak = [row for row in eval_report["offline"] if not row["worth"]]
    assert weak, "random weights were meant to be near chance"
    for row in weak:
        assert any(row["query"] in line and "no evidence" in line for line in eval_report["limits"])


def test_page_is_self_contained(tiny, eval_report):
    page = (tiny / "report" / "report.html").read_text()
    assert sorted(path.name for path in (tiny / "report").glob("[!.]*")) == ["report.html", "report.json"]
    assert not re.search(r"""(src|href)\s*=\s*["']?\s*(https?:)?//""", page)
    assert not re.search(r"""@import|url\(\s*["']?(?!data:)""", page)
    assert "<script" not in page and "<link" not in page
    photos = re.findall(r"data:image/jpeg;base64,([\w+/=]+)", page)
    assert len(photos) == len(eval_report["examples"]) == 12


def test_page_is_made_of_report_json_alone(tiny, report):
    page = (tiny / "report" / "report.html").read_text()
    photos = re.findall(r"data:image/jpeg;base64,([\w+/=]+)", page)
    read = read_report(tiny / "report" / "report.json")
    assert read == report and render_report(read, photos) == page, "made of report.json alone, and of the photos"


def test_bundle_of_another_workload_is_refused(tiny, tmp_path):
    other = tmp_path / "other.yaml"
    other.write_text((tiny / "workload.yaml").read_text().replace("id: b", "id: c"))
    with pytest.raises(InputError, match="does not hold the queries"):
        evaluate(tiny / "tiny.safetensors", other, tmp_path / "report")
    assert not (tmp_path / "report").exists()


def test_missing_test_data_is_refused_in_one_line(tiny, tmp_path, capsys):
    moved = tmp_path / "workload.yaml"
    text = (
        (tiny / "workload.yaml").read_text().replace("weights/", f"{tiny}/weights/").replace("data: data", "data: none")
    )
    moved.write_text(text)
    assert main(["eval", str(tiny / "tiny.safetensors"), str(moved), "-o", str(tmp_path / "report")]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("gemel: ") and "none" in error and "data" in error
    assert not (tmp_path / "report" / "report.json").exists()


def test_requested_memory_size_becomes_the_headline(tiny, tmp_path):
    events = []
    document = evaluate(
        tiny / "tiny.safetensors", tiny / "workload.yaml", tmp_path, EvalOptions(seeds=1, memory="512MiB"),
        progress=lambda event, **fields: events.append((event, fields)),
    )  # fmt: skip
    assert (document.headline.memory, document.headline.memory_bytes) == ("512MiB", 512 * 2**20)
    assert {row.memory for row in document.streaming} == {"min", "50%", "all", "512MiB"}
    assert (
        "512.0 MiB of device memory for weights and workspace: as requested by --memory"
        in (tmp_path / "report.html").read_text()
    )
    assert events[0] == (
        "stages",
        {"names": ["evaluating each query on test", "simulating the streams", "writing the report"]},
    )


def test_evaluation_on_a_gpu_equals_the_cpu(tiny, tmp_path, monkeypatch, report):
    with fake_gpu(monkeypatch) as mixed:
        document = evaluate(tiny / "tiny.safetensors", tiny / "workload.yaml", tmp_path, EvalOptions(seeds=1))
    assert not mixed and document.offline == report.offline


def test_memory_below_the_largest_query_is_refused(tiny, tmp_path):
    with pytest.raises(InputError, match="too little"):
        evaluate(tiny / "tiny.safetensors", tiny / "workload.yaml", tmp_path / "report", EvalOptions(memory="1MiB"))
    assert not (tmp_path / "report").exists()


def test_failing_write_leaves_the_older_report_whole(tiny, tmp_path):
    (tmp_path / "report.json").write_text("older")
    (tmp_path / "report.html").mkdir()
    with pytest.raises(InputError, match=r"report\.html"):
        evaluate(tiny / "tiny.safetensors", tiny / "workload.yaml", tmp_path, EvalOptions(seeds=1))
    assert (tmp_path / "report.json").read_text() == "older"


def test_simulate_of_bundle_and_workload_agree_on_memory(tiny, capsys):
    found = []
    for source in ("tiny.safetensors", "workload.yaml"):
        assert main(["simulate", str(tiny / source), "--memory", "min", "--duration", "5", "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    merged, originals = found
    assert {"memory_bytes", "queries", "bytes_moved", "swaps"} <= set(merged)
    assert {"id", "received", "processed", "late", "dropped", "age_p95_ms"} <= set(merged["queries"][0])
    assert merged["memory_bytes"] == originals["memory_bytes"]
    assert merged["bytes_moved"] < originals["bytes_moved"]


def test_bundle_show_and_verify_report_their_findings(tiny, tmp_path, capsys):
    assert main(["bundle", "verify", str(tiny / "tiny.safetensors"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"ok": True, "problems": [], "unchecked": []}
    assert main(["bundle", "show", str(tiny / "tiny.safetensors"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert len(shown["shared"]) == 4 and [query["id"] for query in shown["queries"]] == ["a", "b"]
    damaged = tmp_path / "damaged.safetensors"
    data = bytearray((tiny / "tiny.safetensors").read_bytes())
    data[random.Random(0).randrange(len(data) // 2, len(data))] ^= 1
    damaged.write_bytes(data)
    assert main(["bundle", "verify", str(damaged), "--json"]) == 1
    refused = json.loads(capsys.readouterr().out)
    assert refused["ok"] is False and len(refused["problems"]) == 1
    assert main(["bundle", "show", str(tmp_path / "absent.safetensors")]) == 2


def test_measured_costs_come_from_the_profile(tiny, tmp_path):
    from gemel.profiler import profile_bundle

    with pytest.raises(InputError, match="never measured"):
        evaluate(tiny / "tiny.safetensors", tiny / "workload.yaml", tmp_path, EvalOptions("measured"))
    found = profile_bundle(tiny / "tiny.safetensors", "cpu", rounds=1, engine="torch").profile
    document = evaluate(tiny / "tiny.safetensors", tiny / "workload.yaml", tmp_path, EvalOptions("measured", seeds=1))
    assert not document.device.modelled and document.device.name == "measured"
    runs = {(row.arm, row.query): row.run_ms for row in document.costs}
    assert runs["merged", "a"] == runs["originals", "a"] == pytest.approx(1000 * found.queries["a"].batches[0].run_s)
    (tiny / "tiny.safetensors.profile.json").unlink()


def test_report_holds_its_command_and_versions(eval_report, tiny):
    (command,) = eval_report["commands"]
    assert command.startswith(f"gemel eval {tiny}/tiny.safetensors {tiny}/workload.yaml -o {tiny}/report")
    assert command.endswith("--memory 50% --seeds 2")
    assert {"python", "torch"} <= eval_report["versions"].keys() and eval_report["settings"]["policy"] == "adaptive"
    recalls = eval_report["offline"][0]["classes"]
    assert [row["class"] for row in recalls] == ["empty", "busy"]
    assert sum(row["merged"] for row in recalls) / 2 == pytest.approx(eval_report["offline"][0]["merged"])


def test_real_time_and_virtual_clock_are_compared(tiny, tmp_path):
    asked = EvalOptions(seeds=1, memory="512MiB", wall_s=0.8)
    wall = evaluate(tiny / "tiny.safetensors", tiny / "workload.yaml", tmp_path, asked).realtime
    assert wall is not None and [row.query for row in wall.queries] == ["a", "b"]
    for row in wall.queries:
        assert row.difference == row.wall - row.virtual
        assert row.received >= row.processed_wall > 0 and row.processed_virtual > 0 and row.run_ms > 0
    assert wall.difference == max(abs(row.difference) for row in wall.queries)


@pytest.mark.parametrize("roi", [None, (4.0, 2.0, 12.0, 8.0), (3.6, 2.2, 11.7, 7.9)])
def test_cropped_picture_is_pasted_back_into_its_region(roi):
    picture = np.random.default_rng(0).integers(0, 255, (6, 8, 3), dtype=np.uint8)
    assert np.array_equal(crop(paste_into_frame(picture, roi), roi), picture)


@pytest.mark.parametrize(
    ("labels", "problem"),
    [
        (
            [BoxLabels(), BoxLabels()],
            "data/test: data: no frame of the test split shows car or bus .query q.: nothing to score",
        ),
        (
            [BoxLabels(("car",), ((5.0, 5.0, 5.0, 9.0),))],
            r"the box \[5.0, 5.0, 0.0, 4.0\] of 'car' in frame 0 .* has no area",
        ),
        (
            [BoxLabels(("car",), (HERE,)), BoxLabels(("bus",), ((60.0, 5.0, 70.0, 9.0),))],
            "frame 1 .* outside its 60 x 40 pixels",
        ),
        ([BoxLabels(("bus",), ((-9.0, 5.0, 0.0, 9.0),))], "outside its 60 x 40 pixels"),
    ],
)
def test_labels_that_cannot_be_scored_are_refused_by_name(labels, problem):
    with pytest.raises(InputError, match=problem) as caught:
        check_boxes(DETECTION, labels, [(60, 40)] * len(labels))
    assert "\n" not in str(caught.value)


def test_a_box_that_reaches_over_the_edge_is_none_of_them():
    check_boxes(DETECTION, [BoxLabels(("car",), ((-3.0, 30.0, 70.0, 44.0),))], [(60, 40)])


@pytest.fixture
def scored_query():
    """Three frames with labels and the predictions of both models."""
    frames = [np.full((40, 60, 3), 90, np.uint8)] * 3
    labels = (BoxLabels(("car",), (HERE,)), BoxLabels(), BoxLabels(("bus", "car"), (HERE, (40.0, 5.0, 55.0, 20.0))))
    split = Split("test", frames, labels, ("u", "u", "v"), (0.0, 1.0, 0.0))
    good = [DetectionPrediction(one.classes, (0.9,) * len(one.boxes), one.boxes) for one in labels]
    worse = [good[0], DetectionPrediction(("car",), (0.4,), (HERE,)), DetectionPrediction(("bus",), (0.8,), (HERE,))]
    footage = Footage(split.units, split.times_s, 5)
    return QueryTest(DETECTION, footage, labels, 0.5, {ORIGINALS: good, MERGED: worse}), split


def test_pycocotools_reads_the_export_and_finds_the_same_map(scored_query, tmp_path):
    coco = pytest.importorskip("pycocotools.coco", reason="pycocotools is not installed")
    cocoeval = pytest.importorskip("pycocotools.cocoeval")
    export_coco([scored_query], tmp_path / "new")
    folder = tmp_path / "new" / "q"
    labels = coco.COCO(str(folder / "labels.json"))
    for name, arm in (("original", ORIGINALS), ("merged", MERGED)):
        found = cocoeval.COCOeval(labels, labels.loadRes(str(folder / f"{name}.json")), "bbox")
        found.evaluate()
        found.accumulate()
        found.summarize()
        ours = average_precision(
            overlaps_of(scored_query[0].predictions[arm], scored_query[0].labels), DETECTION.classes
        )
        assert ours["map"] == pytest.approx(found.stats[0], abs=1e-6)
    images = json.loads((folder / "labels.json").read_text())["images"]
    assert [(one["unit"], one["width"], one["height"]) for one in images] == [
        ("u", 60, 40), ("u", 60, 40), ("v", 60, 40),
    ]  # fmt: skip
    assert all((folder / "data" / one["file_name"]).is_file() for one in images)


def test_failing_export_leaves_nothing(scored_query, tmp_path):
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "q").write_text("in the way of the query's folder")
    with pytest.raises(InputError, match="--coco"):
        export_coco([scored_query], tmp_path / "new")
    assert not (tmp_path / "new" / "q" / "data").exists()


def test_export_folder_that_holds_files_is_refused(tmp_path, tiny):
    (tmp_path / "other").write_text("")
    with pytest.raises(InputError, match="--coco: holds other files"):
        check_export_folder(tmp_path)
    with pytest.raises(InputError, match="there is no directory"):
        check_export_folder(tmp_path / "a" / "b")
    with pytest.raises(InputError, match="no detection query"):
        options = EvalOptions(seeds=1, coco=tmp_path / "coco")
        evaluate(tiny / "tiny.safetensors", tiny / "workload.yaml", tmp_path / "report", options)
    assert not (tmp_path / "report" / "report.json").exists()
