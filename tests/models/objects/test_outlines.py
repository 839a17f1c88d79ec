"""Outlines: overlap of polygons as pycocotools has it, rotated suppression, labels, metric, records, pictures."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from pycocotools import mask as coco_masks

from gemel.edge_runtime.frames.drawing import draw_on
from gemel.edge_runtime.frames.samples import SampleHead
from gemel.models.labels.coco import CocoFile, read_coco
from gemel.models.labels.yolo_labels import YoloFiles
from gemel.models.measures.metrics import f1_of, match_frames
from gemel.models.notes import collect_notes
from gemel.models.objects.boxes import BoxedPicture
from gemel.models.objects.candidates import Candidates, suppress
from gemel.models.objects.outlines import outline_box, outline_iou, rotate_boxes, trace_pixels
from gemel.models.predictions import BoxLabels, DetectionPrediction, Outline
from gemel.models.preprocess import Preprocess
from gemel.models.tasks import task_of
from tests.models.labels.test_coco import PICTURES, make_document, write_document, write_pictures

SIDE = 200
HALVES: Outline = (((0.0, 0.0), (40.0, 0.0), (0.0, 40.0)),)
"""The upper left half of a square of 40 pixels."""
WHOLE = outline_box((0.0, 0.0, 40.0, 40.0))


def draw_star(random: np.random.Generator) -> Outline:
    """A polygon that does not cross itself."""
    angles = np.sort(random.uniform(0, 2 * np.pi, 12))
    radius = random.uniform(20, 60, 12)[:, None]
    points = 100 + random.uniform(-20, 20, 2) + radius * np.stack([np.cos(angles), np.sin(angles)], axis=1)
    return (tuple((float(x), float(y)) for x, y in points),)


def test_overlap_of_polygons_is_that_of_pycocotools() -> None:
    random = np.random.default_rng(0)
    for _ in range(30):
        first, second = draw_star(random), draw_star(random)
        packed = [coco_masks.frPyObjects([np.ravel(one[0]).tolist()], SIDE, SIDE)[0] for one in (first, second)]
        assert abs(outline_iou(first, second) - float(np.max(coco_masks.iou(packed[:1], packed[1:], [0])))) < 0.03
    assert outline_iou(HALVES, WHOLE) == pytest.approx(0.5, abs=0.01)
    assert outline_iou((), WHOLE) == 0 and outline_iou(WHOLE, WHOLE) == 1
    flat: Outline = (((0.0, 5.0), (9.0, 5.0), (4.0, 5.0)),)
    assert outline_iou(flat, flat) == 0 and 0 <= outline_iou(flat, (((1.0, 5.0), (9.0, 5.0), (4.0, 5.0)),)) <= 1


def test_traced_pixels_enclose_the_mask() -> None:
    mask = np.zeros((60, 80), bool)
    mask[10:30, 20:50] = mask[40:55, 5:25] = True
    parts = trace_pixels(mask)
    assert len(parts) == 2
    found = tuple(tuple(map(tuple, one)) for one in parts)
    assert outline_iou(found, (*outline_box((20, 10, 50, 30)), *outline_box((5, 40, 25, 55)))) > 0.9


def test_rotated_boxes_are_suppressed_by_their_own_overlap() -> None:
    boxes = np.array([[0.5, 0.5, 0.6, 0.05]] * 3, np.float32)
    corners = rotate_boxes(boxes, np.array([0.8, 0.82, -0.8], np.float32))
    upright = np.concatenate([corners.min(axis=1), corners.max(axis=1)], axis=1)
    found = Candidates(upright, np.array([0.9, 0.8, 0.7], np.float32), np.zeros(3, np.int64), corners=corners)
    assert suppress(found, 0.5).scores.tolist() == pytest.approx([0.9, 0.7])
    assert len(suppress(found._replace(corners=None), 0.5).scores) == 1


def test_f1_is_of_outlines_where_labels_have_them() -> None:
    said = DetectionPrediction(("car",), (0.9,), ((0.0, 0.0, 40.0, 40.0),), outlines=(HALVES,))
    boxes = BoxLabels(("car",), ((0.0, 0.0, 40.0, 40.0),))
    other = BoxLabels(boxes.classes, boxes.boxes, outlines=((((40.0, 0.0), (40.0, 40.0), (0.0, 40.0)),),))
    same = BoxLabels(boxes.classes, boxes.boxes, outlines=(HALVES,))
    upright = DetectionPrediction(said.classes, said.scores, said.boxes)

    def f1(prediction: DetectionPrediction, label: BoxLabels) -> float:
        return f1_of(match_frames([prediction], [label]).counts())

    assert (f1(said, boxes), f1(said, same), f1(said, other), f1(upright, other)) == (1, 1, 0, 1)
    task = task_of("detection")
    assert task.labels_of(said, 0.5).outlines == (HALVES,) and task.labels_of(said, 0.95).outlines == ()


def test_coco_polygons_and_masks_are_outlines_in_pixels_of_the_picture(tmp_path: Path) -> None:
    document = make_document()
    for one in document["annotations"]:
        x, y, width, height = one["bbox"]
        one["segmentation"] = [[x, y, x + width, y, x, y + height]]
    mask = np.zeros((document["images"][0]["height"], document["images"][0]["width"]), np.uint8, order="F")
    mask[22:40, 15:35] = 1
    packed = coco_masks.encode(mask)
    document["annotations"][0]["segmentation"] = {
        "size": packed["size"],
        "counts": str(packed["counts"], "ascii"),  # type: ignore[arg-type]
    }
    write_pictures(tmp_path)
    write_document(tmp_path, document)
    file = CocoFile(tmp_path / "annotations.json", tmp_path / "images")
    found = read_coco(file, {"car": "car"}, "gate", with_outlines=True)
    labels = [one.label for one in found if isinstance(one.label, BoxLabels)]
    assert len(labels) == PICTURES and labels[1].outlines == ((((20.0, 20.0), (50.0, 20.0), (20.0, 45.0)),),)
    assert outline_iou(labels[0].outlines[0], outline_box((15, 22, 35, 40))) > 0.85
    del document["annotations"][2]["segmentation"]
    write_document(tmp_path, document)
    with collect_notes() as notes:
        bare = read_coco(file, {"car": "car"}, "gate", with_outlines=True)
    assert not any(one.label.outlines for one in bare if isinstance(one.label, BoxLabels))
    assert any(f"1 of {PICTURES} objects have a box alone, so all are compared by boxes" in note for note in notes)


def test_yolo_lines_of_four_corners_are_outlines(tmp_path: Path) -> None:
    write_pictures(tmp_path, (100, 50))
    (tmp_path / "labels").mkdir()
    for path in sorted((tmp_path / "images").iterdir()):
        (tmp_path / "labels" / f"{path.stem}.txt").write_text("0 0.2 0.2 0.6 0.4 0.5 0.8 0.1 0.6\n")
    files = YoloFiles(tmp_path / "data.yaml", tmp_path, {0: "car"}, {})
    found = files.read(sorted((tmp_path / "images").iterdir()), {"car": "car"}, "gate", with_outlines=True)
    label = found[0].label
    assert isinstance(label, BoxLabels)
    np.testing.assert_allclose(label.outlines[0][0], [(20, 10), (60, 20), (50, 40), (10, 30)])
    np.testing.assert_allclose(label.boxes[0], (10, 10, 60, 40))
    assert isinstance(files.read([found[0].path], {"car": "car"}, "gate")[0].label, BoxLabels)
    assert BoxedPicture(Path(), found[0].size or (0, 0, 1), (1, 1)).outlines == []  # type: ignore[arg-type]


def test_record_of_outlines_is_read_again_and_drawn() -> None:
    found = DetectionPrediction(("car",), (0.9,), ((10.0, 10.0, 50.0, 50.0),), outlines=((HALVES[0],),))
    moved = found.in_frame(10, 20, (100, 80))
    assert moved.outlines[0][0][0] == (10.0, 20.0)
    record = moved.to_record()
    assert record["detections"][0]["polygons"] == [[[10.0, 20.0], [50.0, 20.0], [10.0, 60.0]]]
    head = SampleHead.model_validate({
        "format": 1, "run": "r", "query": "gate", "camera": "gate", "frame": 1, "captured_at": 0, "bundle": "0" * 12,
        "size": [100, 80], "roi": None, "threshold": 0.5, "expected": 1, **json.loads(json.dumps(record)),
    })  # fmt: skip
    assert head.prediction(["car"]) == moved
    picture = draw_on(np.zeros((80, 100, 3), np.uint8), [{"query": "gate", **record}])
    assert picture[20, 30].any() and picture[40, 30].any() and not picture[50, 60].any()


def test_outlines_beyond_the_frame_keep_their_shape() -> None:
    from gemel.models.objects.outlines import place_points

    letterbox = Preprocess((100, 100), "letterbox")
    corners = np.array([[-0.1, 0.5], [0.5, 0.2]], np.float32)
    np.testing.assert_allclose(place_points(corners, (200, 100), letterbox), [[-20, 50], [100, -10]], atol=1e-3)
