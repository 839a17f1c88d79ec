"""Staleness curves from footage: an answer of some frames ago against the truth of now, within a clip."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from gemel.cli import main
from gemel.staleness import frame_pairs, staleness_curve
from gemel.stream_eval import Footage
from models.predictions import ClassPrediction
from models.tasks import task_of
from tests.edge_runtime.tiny import FACTORY, tiny_bundle

CLASSES = ("free", "taken")
TASK = task_of("classification")


def answers(labels: str) -> list[ClassPrediction]:
    return [ClassPrediction(label, 1.0, (1.0, 0.0)) for label in spelled(labels)]


def spelled(labels: str) -> list[str]:
    return [CLASSES[int(label)] for label in labels]


def test_an_answer_is_so_many_of_the_querys_frames_old_and_of_the_same_clip():
    footage = Footage(("a", "a", "a", "b", "b"), (0.0, 0.1, 0.2, 0.0, 0.2), 5.0)
    assert frame_pairs(footage, 0) == [(0, 0), (1, 1), (2, 2), (3, 3), (4, 4)]
    assert frame_pairs(footage, 1) == [(0, 2), (3, 4)], "a frame at 5 a second is 0.2 s"
    assert frame_pairs(footage, 2) == []


def test_what_changes_every_second_frame_is_worth_less_the_older_it_is():
    labels = "00110011"
    footage = Footage(tuple("a" * 8), tuple(index / 5 for index in range(8)), 5.0)
    curve = staleness_curve(TASK, footage, answers(labels), spelled(labels), CLASSES, 0.0)
    assert curve[0] == 1.0 and curve[1] == pytest.approx(4 / 7, abs=0.05) and curve[2] == 0
    assert list(curve) == sorted(curve, reverse=True) and len(curve) == 7, "no two frames are eight apart"


def test_where_nothing_changes_an_old_answer_is_as_good_as_a_fresh_one():
    footage = Footage(tuple("a" * 4), (0.0, 0.2, 0.4, 0.6), 5.0)
    assert staleness_curve(TASK, footage, answers("0101")[:1] * 4, spelled("0000"), CLASSES, 0.0) == (1.0,) * 4


def test_with_its_workload_a_bundles_profile_says_what_answers_are_worth_as_they_age(tiny, tmp_path, capsys):
    torch.set_num_threads(1)
    bundle = tmp_path / "tiny.safetensors"
    bundle.write_bytes((tiny / "tiny.safetensors").read_bytes())
    options = ("--workload", str(tiny / "workload.yaml"), "--device", "cpu", "--engine", "torch", "--json")
    assert main(["profile", str(bundle), *options]) == 0
    found = json.loads(capsys.readouterr().out)
    curves = {query["id"]: query["staleness"] for query in found["queries"]}
    assert any(len(curve) > 1 for curve in curves.values()), "val clips have frames one after the other"
    for curve in curves.values():
        assert curve == sorted(curve, reverse=True) and all(0 <= accuracy <= 1 for accuracy in curve)


def test_a_workload_that_is_not_the_bundles_measures_nothing(tiny, tmp_path, capsys):
    bundle = tiny_bundle(tmp_path / "other.safetensors")
    options = ("--factory", FACTORY, "--device", "cpu", "--engine", "torch")
    assert main(["profile", str(bundle.path), "--workload", str(tiny / "workload.yaml"), *options]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert not Path(f"{bundle.path}.profile.json").exists()
