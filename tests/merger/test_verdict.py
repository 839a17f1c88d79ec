"""What a merge proves by default, from footage without labels, and what it says where that is not enough."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
import yaml

from gemel.merger import MergeOptions, merge
from gemel.merger.checkpoint import Checkpoint, Step
from gemel.merger.context import MergeContext
from gemel.merger.distributed import ProcessGroup
from gemel.merger.looks import LookFile
from gemel.merger.merge import MergeReport
from gemel.merger.observe import compare_answers, sum_by
from gemel.merger.proof import PROOF
from gemel.merger.verdict import TriedModel
from gemel.merger.workload_data import WorkloadData, cut_search, join_splits
from gemel.models.bundle import open_bundle
from gemel.models.data import load_split
from gemel.models.footage import FOOTAGE, load_footage
from gemel.models.predictions import ClassPrediction, DetectionPrediction
from gemel.models.workload import Workload, load_workload
from tests.merger.footage import INTERVAL_MS, add_footage
from tests.merger.tiny import data_of

INT8 = MergeOptions(weights="int8")
ENOUGH, FEW = 160, 60
"""Clips of 20 s: blocks that prove three queries, and blocks that cannot."""


def merge_int8(workload: Workload, out: Path, **options: object) -> MergeReport:
    """The originals in eight bits: models that answer as before."""
    return merge(workload, out, "none", options=replace(INT8, **options))  # type: ignore[arg-type]


def test_merge_is_proven_by_agreement_on_footage(workload: Workload, tmp_path: Path) -> None:
    report = merge_int8(add_footage(workload, ENOUGH), tmp_path / "b.safetensors")
    assert report.saved_fraction > 0.5 and report.met
    for query in report.to_json()["queries"]:
        assert (query["proven"], query["state"], query["from"]) == (True, "proven", "agreement")
        assert 0.95 <= query["lower_end"] < 1 and query["answers_kept"] == 1.0 > query["answers_kept_end"]
    evidence = open_bundle(report.bundle, ["tests.merger.tiny:tiny_net"]).query("q0").evidence
    assert evidence is not None and evidence.get("proven") is True


def test_merge_with_little_footage_says_how_much_it_lacks_and_changes_nothing(
    workload: Workload, tmp_path: Path
) -> None:
    report = merge_int8(add_footage(workload, FEW), tmp_path / "b.safetensors")
    assert report.saved_fraction < 0.1 and report.met
    assert {query.state.value for query in report.queries} == {"unchanged"}
    (note,) = (note for note in report.notes if note.startswith("q0: cannot be proven"))
    assert "minutes more of footage" in note and "labelled val frames" in note and "--accept-unproven" in note


def test_merge_says_which_query_the_last_of_holms_procedure_could_prove(
    workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gemel.merger.reference.can_tell", lambda _, error: error == PROOF.error)
    report = merge_int8(add_footage(workload, FEW), tmp_path / "b.safetensors")
    assert any(note.startswith("q0: can be proven only after all others with ") for note in report.notes)


def test_merge_accepted_by_its_plain_ratio_is_never_called_proven(workload: Workload, tmp_path: Path) -> None:
    report = merge_int8(add_footage(workload, FEW), tmp_path / "b.safetensors", accept_unproven=True)
    assert report.saved_fraction > 0.5
    for query in report.queries:
        assert not query.proven and query.source is None and "minutes more of footage" in query.needs


def test_second_merge_on_the_same_footage_has_less_error(workload: Workload, tmp_path: Path) -> None:
    load = add_footage(workload, ENOUGH)
    merge_int8(load, tmp_path / "a.safetensors")
    again = merge_int8(load, tmp_path / "b.safetensors")
    assert all(query.proven for query in again.queries), "the same model is no new look"
    other = merge(load, tmp_path / "c.safetensors", "none", options=MergeOptions(weights="int4"))
    assert any("tried on the same data before" in note for note in other.notes)
    looks = LookFile(load.path).looks
    assert {look.error for look in looks} == {PROOF.error, PROOF.later_looks / 2} and len(looks) == 6


def test_training_footage_proves_nothing(workload: Workload, tmp_path: Path) -> None:
    load = add_footage(workload, 2)
    for query in load.queries:
        (folder,) = query.footage
        shutil.rmtree(folder)
        folder.mkdir()
        for number, path in enumerate(sorted((data_of(load, query.id) / "train").rglob("*.png"))):
            shutil.copy(path, folder / f"clip{number:04d}__000000.png")
    notes = merge_int8(load, tmp_path / "b.safetensors").notes
    assert any("the footage is what the models were trained on" in note for note in notes)


def test_footage_of_one_scene_proves_nothing(workload: Workload, tmp_path: Path) -> None:
    load = add_footage(workload, 30)
    for query in load.queries:
        first = sorted(query.footage[0].glob("clip0000__*"))
        for path in sorted(query.footage[0].glob("*.png")):
            shutil.copyfile(first[int(path.stem.split("__")[1]) // INTERVAL_MS], path) if path not in first else None
    notes = merge_int8(load, tmp_path / "b.safetensors").notes
    assert any("all blocks of the footage show one scene" in note for note in notes)


def test_footage_of_another_camera_is_told(workload: Workload, caplog: pytest.LogCaptureFixture) -> None:
    document = yaml.safe_load(add_footage(workload, 2).path.read_text())
    document["cameras"]["yard"] = document["cameras"]["c"]
    document["queries"][1] |= {"camera": "yard", "footage": document["queries"][0]["footage"]}
    workload.path.write_text(yaml.safe_dump(document))
    load_workload(workload.path)
    assert "is that of camera c: agreement is measured there" in caplog.text


@pytest.mark.parametrize("is_another", [False, True])
def test_footage_that_shows_another_view_than_val_is_told(
    workload: Workload, caplog: pytest.LogCaptureFixture, is_another: bool
) -> None:
    load = add_footage(workload, 30)
    (folder,) = load.queries[0].footage
    for path in folder.glob("*.png") if is_another else ():
        picture = cv2.imread(str(path))
        assert picture is not None
        cv2.imwrite(str(path), cv2.rotate(picture, cv2.ROTATE_90_CLOCKWISE))
    data = WorkloadData(load, torch.device("cpu"), ProcessGroup())
    assert data.footage[load.queries[0].id] is not None
    assert ("looks like that of another camera than val" in caplog.text) == is_another


def test_footage_shorter_than_half_a_block_is_told(workload: Workload, caplog: pytest.LogCaptureFixture) -> None:
    load = add_footage(workload, 1)
    (folder,) = load.queries[0].footage
    (folder / "clip0000__010000.png").rename(folder / "clip0000__003000.png")
    assert load_footage(load.queries[0]) is None
    assert "shorter than half a block of 20 s and prove nothing: clip0000" in caplog.text


def test_footage_that_does_not_exist_is_named(workload: Workload, tmp_path: Path) -> None:
    document = yaml.safe_load(workload.path.read_text())
    document["cameras"]["c"]["footage"] = "nowhere.mp4"
    workload.path.write_text(yaml.safe_dump(document))
    with pytest.raises(Exception, match=r"nowhere\.mp4: footage: does not exist"):
        merge_int8(load_workload(workload.path), tmp_path / "b.safetensors")


def test_footage_is_cut_in_time_with_a_gap(workload: Workload) -> None:
    cut = load_footage(add_footage(workload, 100).query("q0"))
    assert cut is not None and cut.training is not None
    last, first = cut.training.units[-1], cut.proof.units[0]
    assert (last, first) == ("clip0019", "clip0021") and max(cut.blocks) == 78
    assert len(set(cut.training.units)) == FOOTAGE.training_part * 100


def test_search_goes_by_clips_of_train_that_do_not_train(workload: Workload) -> None:
    split = load_split(workload.queries[0], "train")
    several = replace(split, units=tuple(f"clip{place // 5}" for place in range(len(split))))
    train, search = cut_search(workload.queries[0], join_splits(several, several))
    assert not set(train.units) & set(search.units) and 0.1 < len(search) / len(split) / 2 < 0.35
    assert cut_search(workload.queries[0], split) == (split, split), "few frames are for both"


def test_agreement_target_is_asked_for_beside_the_accuracy(workload: Workload, tmp_path: Path) -> None:
    document = yaml.safe_load(add_footage(workload, ENOUGH).path.read_text())
    document["agreement_target"] = 0.99
    workload.path.write_text(yaml.safe_dump(document))
    report = merge_int8(load_workload(workload.path), tmp_path / "b.safetensors")
    assert {query.state.value for query in report.queries} == {"unchanged"}
    assert any("agreement of 0.99" in note for note in report.notes)


def test_differences_of_a_detector_are_objects_not_found_again_and_added(workload: Workload) -> None:
    query = replace(workload.queries[0], task="detection", classes=("car",))
    box, moved, other = (0.0, 0.0, 10.0, 10.0), (4.0, 0.0, 14.0, 10.0), (20.0, 0.0, 30.0, 10.0)
    before = [DetectionPrediction(("car",), (0.9,), (box,))] * 4
    after = [
        DetectionPrediction(("car",), (0.8,), (box,)), DetectionPrediction(("car",), (0.8,), (moved,)),
        DetectionPrediction(), DetectionPrediction(("car", "car"), (0.9, 0.8), (box, other)),
    ]  # fmt: skip
    found = compare_answers(query, before, after, 0.5)
    assert found.added is not None
    assert (found.differ[:, 0].tolist(), found.added[:, 0].tolist()) == ([0, 1, 1, 0], [0, 1, 0, 1])


def test_tried_model_survives_a_checkpoint(workload: Workload, tmp_path: Path) -> None:
    observed = MergeContext(add_footage(workload, 4)).data.observe_original("q0")
    tried = TriedModel(observed, 1.0, None, "model", "data")
    written = Checkpoint(tmp_path / "work", {}, False)
    written.step(Step.ACCEPTED, lambda: tried)
    written.save()
    again = Checkpoint(tmp_path / "work", {}, True).step(Step.ACCEPTED, lambda: None)
    assert again is not None and again.observed.labels is not None and again.observed.blocks is not None
    assert observed.labels is not None and observed.blocks is not None
    assert np.array_equal(again.observed.labels.merged, observed.labels.merged)
    assert np.array_equal(again.observed.blocks.shown, observed.blocks.shown)


def test_answers_differ_by_class_of_the_original(workload: Workload) -> None:
    query = workload.queries[0]
    before, after = (
        [ClassPrediction(query.classes[place], 0.9, ()) for place in places] for places in ((0, 0, 1), (0, 1, 1))
    )
    found = compare_answers(query, before, after, 0.0)
    assert sum_by(found.differ, [0, 0, 1]).tolist() == [[1, 0], [0, 0]] and found.places.tolist() == [1]


def test_looks_are_json_lines_beside_the_workload(tmp_path: Path) -> None:
    looks = LookFile(tmp_path / "w.yaml")
    assert looks.record("q", "footage", "first") == PROOF.error == looks.record("q", "footage", "first")
    assert looks.record("q", "footage", "second") == PROOF.later_looks / 2
    assert looks.record("q", "work", "second") == PROOF.error
    looks.save()
    (row, *_) = (json.loads(line) for line in looks.path.read_text().splitlines())
    assert row["data"] == "footage" and LookFile(tmp_path / "w.yaml").looks == looks.looks
