"""Frames on which nothing could go wrong are no evidence: such queries keep their weights, which cannot miss."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest
import torch
import yaml
from torch import Tensor, nn

from gemel import commands
from gemel.cli import main
from gemel.merger import MergeOptions, merge
from gemel.models.bundle import open_bundle
from gemel.models.detector import Detector
from gemel.models.files.weights import load_weights, save_weights
from gemel.models.workload import Workload, load_workload
from gemel.models.zoo import build_query
from gemel.report.document import Report
from gemel.summaries import evaluation_text
from tests.merger.options import QUICK
from tests.merger.tiny import data_of

SIDE = 32
FACTORIES = ["tests.merger.tiny:tiny_net"]


def use_flat_frames(workload: Workload, query: str, folders: str, count: int = 200) -> None:
    """Give a query unlabelled footage instead: frames of its classes at these places of `classes`, over and over."""
    labelled, flat = data_of(workload, query), workload.path.parent / f"{query}-flat"
    classes = workload.query(query).classes
    shown = [sorted(labelled.glob(f"*/{classes[int(place)]}/*.png")) for place in folders]
    flat.mkdir()
    for index in range(count):
        frames = shown[index % len(shown)]
        (flat / f"{index:06d}.png").write_bytes(frames[index % len(frames)].read_bytes())
    document = yaml.safe_load(workload.path.read_text())
    next(one for one in document["queries"] if one["id"] == query)["data"] = flat.name
    workload.path.write_text(yaml.safe_dump(document))


def test_merge_of_a_quiet_classifier_keeps_its_weights(workload: Workload, tmp_path: Path) -> None:
    use_flat_frames(workload, "q1", "1")
    load = load_workload(workload.path)
    report = merge(load, tmp_path / "b.safetensors", options=MergeOptions(QUICK.recipe))
    query, bundle = report.queries[1], open_bundle(report.bundle, FACTORIES)
    assert (query.evidence, query.reason) == ("none", "all 40 frames of test have one answer (right)")
    assert (query.ratio, query.met, query.proven, query.state.value) == (1.0, True, False, "unchanged")
    (note,) = (note for note in report.notes if note.startswith("q1: no evidence: all 40 frames of val"))
    assert "it keeps its own weights" in note and "--accept-unproven" in note and "minutes more of footage" in note
    original = load_weights(load.query("q1"), build_query(load.query("q1"))).state_dict()
    merged = bundle.build("q1").state_dict()
    assert all(torch.equal(tensor, merged[key]) for key, tensor in original.items())


def test_accept_unproven_crosses_every_gate(workload: Workload, tmp_path: Path) -> None:
    use_flat_frames(workload, "q1", "1")
    report = merge(load_workload(workload.path), tmp_path / "b.safetensors", options=QUICK)
    (note,) = (note for note in report.notes if note.startswith("q1: no evidence: all 40 frames of val"))
    assert "a plain ratio on val accepts it" in note and report.saved_fraction > 0.3
    assert not any(query.proven for query in report.queries)


def test_merge_command_that_changes_nothing_exits_with_zero(workload: Workload, tmp_path: Path, capsys) -> None:
    use_flat_frames(workload, "q2", "0")
    out = tmp_path / "b.safetensors"
    assert main(["merge", str(workload.path), "-o", str(out), "--method", "none", "--weights", "int8", "--json"]) == 0
    shown = capsys.readouterr()
    document = json.loads(shown.out)
    assert {row["state"] for row in document["queries"]} == {"unchanged"}
    assert all(row["met"] and not row["proven"] and row["lower_end"] is None for row in document["queries"])
    assert "note: q2: no evidence: all 40 frames of val have one answer (high)" in shown.err
    assert not any(query.stored for query in open_bundle(out).queries)
    assert main(["bundle", "show", str(out)]) == 0
    assert "no evidence: all 40 frames of test have one answer (high)" in capsys.readouterr().out


def test_merge_with_too_little_val_says_so_and_changes_nothing(workload: Workload, tmp_path: Path, capsys) -> None:
    out = tmp_path / "b.safetensors"
    assert main(["merge", str(workload.path), "-o", str(out)]) == 0
    shown = capsys.readouterr()
    assert "nothing is shared: q0, q1, q2 cannot be proven with what there is here" in shown.out
    assert main(["merge", str(workload.path), "-o", str(tmp_path / "b2.safetensors"), "--json"]) == 0
    shown = capsys.readouterr()
    assert "q0: cannot be proven with 6 labelled frames or clips of val: needs " in shown.err
    assert all(row["ratio"] == 1.0 and row["state"] == "unchanged" for row in json.loads(shown.out)["queries"])


@pytest.mark.parametrize("method", ["joint", "ceiling", "gemel"])
def test_merge_by_any_method_leaves_a_quiet_query_alone(workload: Workload, tmp_path: Path, method: str) -> None:
    use_flat_frames(workload, "q0", "0")
    options = MergeOptions(recipe=QUICK.recipe, max_flops=1.0)
    bundle = open_bundle(merge(load_workload(workload.path), tmp_path / "b", method, options=options).bundle)
    assert not any(
        query == "q0" and key.endswith("weight") for one in bundle.manifest.shared for query, key in one.members
    )
    evidence = bundle.query("q0").evidence
    assert evidence is not None and evidence["ratio"] == 1.0 and bundle.query("q0").trained is None


def test_merge_without_any_evidence_says_nothing_of_layers(workload: Workload, tmp_path: Path, capsys) -> None:
    for query in workload.queries:
        use_flat_frames(workload, query.id, "1", count=30)
    assert main(["merge", str(workload.path), "-o", str(tmp_path / "b.safetensors")]) == 0
    shown = capsys.readouterr()
    assert shown.out.count("no evidence: all 6 frames of test have one answer") == 3
    assert "nothing is shared" not in shown.out and "layer in common" not in shown.err


def test_original_that_few_frames_cannot_tell_from_chance_is_no_evidence(workload: Workload, tmp_path: Path) -> None:
    for name in ("left", "right"):
        for frame in sorted((data_of(workload, "q1") / "val" / name).iterdir())[2:]:
            frame.unlink()
    report = merge(workload, tmp_path / "b.safetensors", "none", options=MergeOptions(weights="int8"))
    (note,) = (note for note in report.notes if note.startswith("q1: no evidence"))
    assert "on 4 frames of val its original's" in note and "cannot be told from chance (0.50)" in note


class Spotter(Detector):
    """Finds one object where a frame is bright."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 1, 1)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        """The brightness of each pixel."""
        return (self.conv(x),)

    def finish_outputs(self, outputs: Any) -> tuple[Tensor, ...]:
        """The same box in every bright frame."""
        is_bright = outputs[0].flatten(1).amax(dim=1) > 1.5
        boxes = torch.tensor([[0.2, 0.2, 0.6, 0.6]]).expand(len(is_bright), 1, 4)
        return boxes, 0.9 * is_bright[:, None], torch.zeros(len(is_bright), 1, dtype=torch.int64)

    def loss(self, outputs: Any, targets: Any) -> Tensor:
        """Nothing to learn."""
        return outputs[0].square().mean()

    def distill(self, outputs: Any, teacher: Any) -> Tensor:
        """The distance of the brightness."""
        return (outputs[0] - teacher[0]).square().mean()

    def export_outputs(self, x: Tensor) -> tuple[Tensor]:
        """The brightness of each pixel."""
        return self(x)


def spotter(num_classes: int) -> nn.Module:
    """The factory that the workloads name."""
    return Spotter()


def write_spotters(folder: Path, bright: range, classes: tuple[str, ...] = ("lamp",), count: int = 100) -> Path:
    """A workload of two equal detectors and unlabelled footage that is bright in these frames."""
    (folder / "frames").mkdir(parents=True)
    for index in range(count):
        frame = np.full((SIDE, SIDE, 3), (230 if index in bright else 20) + index % 20, np.uint8)
        cv2.imwrite(str(folder / "frames" / f"{index:04d}.png"), frame)
    queries = [
        {"id": name, "camera": "c", "task": "detection", "classes": list(classes), "input_size": SIDE, "data": "frames",
         "model": "tests.merger.test_evidence:spotter", "weights": f"{name}.safetensors"}
        for name in ("a", "b")
    ]  # fmt: skip
    path = folder / "workload.yaml"
    document = {"name": "spots", "cameras": {"c": {"source": "none.mp4", "fps": 5}}, "queries": queries}
    path.write_text(yaml.safe_dump(document))
    for query in load_workload(path).queries:
        model = build_query(query)
        with torch.no_grad():
            model.get_parameter("conv.weight").fill_(1 / 3)
            model.get_parameter("conv.bias").zero_()
        assert isinstance(query.weights, Path)
        save_weights(query.weights, model.state_dict())
    return path


@pytest.mark.parametrize(
    ("bright", "reason"), [(range(0), "test holds no objects (lamp); 2 are needed"), (range(60, 100), "")]
)
def test_merge_of_a_detector_needs_objects(tmp_path: Path, bright: range, reason: str) -> None:
    path = write_spotters(tmp_path / "w", bright)
    report = merge(load_workload(path), tmp_path / "b.safetensors", "none")
    assert [one.reason for one in report.queries] == [reason, reason] and report.met


def test_merge_names_the_classes_that_val_never_shows(tmp_path: Path) -> None:
    path = write_spotters(tmp_path / "w", range(60, 100), classes=("lamp", "torch", "fire"))
    report = merge(load_workload(path), tmp_path / "b.safetensors", "none")
    assert report.met and len([note for note in report.notes if "fewer than" in note]) == 2
    text = "a: val shows 2 of 3 classes fewer than 20 times: torch (0), fire (0); "
    assert any(note.startswith(text) for note in report.notes)


def test_eval_of_quiet_footage_says_that_it_is_no_evidence(tmp_path: Path, capsys) -> None:
    path, out = write_spotters(tmp_path / "w", range(60, 100)), tmp_path / "b.safetensors"
    assert merge(load_workload(path), out, "none").met
    for frame in sorted((tmp_path / "w" / "frames").iterdir()):
        cv2.imwrite(str(frame), np.full((SIDE, SIDE, 3), 30, np.uint8))
    assert main(["eval", str(out), str(path), "-o", str(tmp_path / "report"), "--json"]) == 0
    shown = capsys.readouterr()
    document = json.loads(shown.out)
    assert [(row["evidence"], row["state"]) for row in document["offline"]] == [("none", "unchanged")] * 2
    assert "note: a: no evidence: test holds no objects (lamp); 2 are needed; it is unchanged" in shown.err
    page = (tmp_path / "report/report.html").read_text()
    assert "2 of 2 queries have no evidence: a, test holds no objects" in page
    table = evaluation_text(Report.model_validate(document)).split("stream: ")[0]
    assert "1.000" not in table.replace("1.00 -> 1.00", ""), "an F1 of nothing is none"
    assert "answers as before" not in page


def test_seconds_of_a_merge_count_what_is_loaded_before_it(tmp_path: Path, capsys, monkeypatch) -> None:
    path = write_spotters(tmp_path / "w", range(60, 100))
    ticks = iter(range(0, 10**6, 100))
    monkeypatch.setattr(commands, "time", SimpleNamespace(monotonic=lambda: next(ticks)))
    assert main(["merge", str(path), "-o", str(tmp_path / "b.safetensors"), "--method", "none", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["seconds"] >= 100
