"""A sample holds what the model was shown, to the pixel, and what it answered; anything else is refused."""

from __future__ import annotations

import cv2
import numpy as np
import pytest

from edge_runtime.queues import Frame
from edge_runtime.results import RunIdentity, result_record
from edge_runtime.samples import expected_agreement, read_head, read_sample, sample_bytes
from models.errors import InputError
from models.predictions import ClassPrediction, DetectionPrediction
from tests.edge_runtime.tiny import change_head, picture, query

IMAGE = picture(3, 200, 120)
ROI = (10.0, 5.0, 110.0, 85.0)
SEEN = DetectionPrediction(("a", "b"), (0.9, 0.4), ((11.0, 6.0, 60.5, 40.0), (20.0, 20.0, 30.0, 30.0)))


def record(asked, answer):
    return result_record(asked, Frame(7, 5.0, 1.7e9, IMAGE), answer, 5.01, RunIdentity("ab" * 32, "0011"))


@pytest.fixture
def sample_file(tmp_path):
    """A sample of a detector that looks at a part of the frame."""
    asked = query("gate", "left", task="detection", roi=ROI, input_size=32, min_score=0.2, threshold=0.3)
    path = tmp_path / "a.png"
    path.write_bytes(sample_bytes(record(asked, SEEN), IMAGE, asked))
    return path, asked


def test_sample_picture_is_the_model_input(sample_file):
    path, asked = sample_file
    sample = read_sample(path)
    shown = asked.preprocess.resize(IMAGE[5:85, 10:110])
    assert np.array_equal(sample.picture, shown.permute(1, 2, 0).numpy())
    assert np.array_equal(asked.preprocess.resize(sample.picture).numpy(), shown.numpy())
    opened = cv2.imread(str(path))  # as any viewer does
    assert opened is not None and np.array_equal(opened[..., ::-1], sample.picture)


def test_sample_head_holds_the_answer(sample_file):
    head = read_head(sample_file[0])
    assert (head.query, head.camera, head.frame, head.bundle) == ("gate", "left", 7, "ab" * 6)
    assert (head.size, head.roi, head.threshold, head.captured_at) == ([100, 80], list(ROI), 0.3, 1.7e9)
    assert head.label is None and head.detections is not None
    assert [(one.name, one.score, tuple(one.box)) for one in head.detections] == list(
        zip(SEEN.classes, SEEN.scores, SEEN.boxes, strict=True)
    )


def test_sample_of_classification_has_label(tmp_path):
    asked = query("gate", "left")
    (tmp_path / "a.png").write_bytes(sample_bytes(record(asked, ClassPrediction("b", 0.7, (0.3, 0.7))), IMAGE, asked))
    head = read_head(tmp_path / "a.png")
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
    path = sample_file[0]
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(InputError, match=text) as error:
        read_sample(path)
    assert str(error.value).startswith(str(path)) and "\n" not in str(error.value)


def test_read_sample_refuses_truncation(sample_file):
    path = sample_file[0]
    path.write_bytes(path.read_bytes()[:-40])
    assert read_head(path).frame == 7
    with pytest.raises(InputError, match="not an image"):
        read_sample(path)
