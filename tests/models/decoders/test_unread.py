"""What a model's file says and its reader does not use is a note or a refusal, never silence."""

from __future__ import annotations

from pathlib import Path

import pytest

import gemel
from gemel.models.errors import InputError
from gemel.models.notes import collect_notes
from tests.models.decoders.tiny_graphs import TinyClassifier, TinyYolox, export

NAMES = '["car", "bus"]'


def notes_of(folder: Path, **metadata: str) -> list[str]:
    path = export(folder / "net.onnx", TinyYolox(2), **{"names": NAMES, **metadata})
    with collect_notes() as notes:
        gemel.load_model(path)
    return notes


@pytest.mark.parametrize(("key", "value", "note"), [
    ("labels", '["bus", "car"]', "names its classes twice; `labels` has others (bus, car) and is not read"),
    ("id2label", '{"0": "bus", "1": "car"}', "names its classes twice; `id2label` has others"),
    ("mean", "[0.5, 0.5, 0.5]", "its metadata mean may say how frames are prepared, and are not read"),
    ("image_std", "[0.5, 0.5, 0.5]", "its metadata image_std may say"),
    ("input.scale", "255", "its metadata input.scale may say"),
    ("color_format", "BGR", "its metadata color_format may say"),
    ("channel_order", "bgr", "its metadata channel_order may say"),
    ("preprocessing", "letterbox", "its metadata preprocessing may say"),
    ("rescale_factor", "0.0039", "its metadata rescale_factor may say"),
    ("conf_threshold", "0.6", "`conf_threshold: 0.6` is not followed; set `min_score`"),
    ("score_thresh", "0.6", "`score_thresh: 0.6` is not followed"),
])  # fmt: skip
def test_keys_of_known_meaning_that_are_not_read_are_noted(tmp_path: Path, key: str, value: str, note: str) -> None:
    assert any(note in one for one in notes_of(tmp_path, **{key: value}))


def test_keys_that_say_nothing_of_classes_or_frames_are_silent(tmp_path: Path) -> None:
    keys = ("date", "version", "license", "docs", "stride", "batch", "imgsz", "author_email", "args", "opset")
    assert notes_of(tmp_path, classes=NAMES, **dict.fromkeys(keys, "1")) == []


@pytest.mark.parametrize("names", ['["car"]', '["a", "b", "c"]', "[1, 2]"])
def test_names_that_do_not_fit_the_columns_are_refused(tmp_path: Path, names: str) -> None:
    path = export(tmp_path / "net.onnx", TinyClassifier(2), names=names)
    with pytest.raises(InputError, match="classes: names "):
        gemel.load_model(path)
