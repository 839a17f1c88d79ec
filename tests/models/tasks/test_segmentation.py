"""Segmentation: labels from PNG files, the way through letterbox and crop and back, mIoU, losses, the zoo."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
import torchvision

from gemel.merger.objectives.outputs import SegmentationObjective
from gemel.models import zoo
from gemel.models.data import load_split
from gemel.models.errors import InputError
from gemel.models.labels.rle import decode_rle
from gemel.models.measures.evaluation import find_gap
from gemel.models.notes import collect_notes
from gemel.models.objects.masks import IGNORED
from gemel.models.predictions import MaskLabels, MaskPrediction
from gemel.models.preprocess import Preprocess
from gemel.models.tasks import task_of
from gemel.models.tasks.segmentation import choose_classes, prepare_mask
from tests.models.queries import make_query

TASK = task_of("segmentation")
CLASSES = ("background", "person")
WHOLE = (0.0, 0.0, 4.0, 4.0)
RESIZES = [Preprocess((24, 32), resize) for resize in ("stretch", "letterbox", "center-crop")]


def labels_of(*rows: str) -> MaskLabels:
    """A mask by digits; `.` is ignored."""
    mask = np.array([[IGNORED if value == "." else int(value) for value in row] for row in rows], np.uint8)
    return MaskLabels(mask, (0.0, 0.0, float(mask.shape[1]), float(mask.shape[0])))


def prediction_of(*rows: str) -> MaskPrediction:
    label = labels_of(*rows)
    return MaskPrediction(label.mask, label.extent, label.mask.shape[::-1], CLASSES)


def write_masks(folder: Path, mask: np.ndarray, split: str = "train", count: int = 1) -> Path:
    """A split of pictures and masks of one size."""
    for part in ("images", "masks"):
        (folder / split / part).mkdir(parents=True)
    for index in range(count):
        picture = np.full((*mask.shape, 3), index, np.uint8)
        cv2.imwrite(str(folder / split / "images" / f"{index}.png"), picture)
        cv2.imwrite(str(folder / split / "masks" / f"{index}.png"), mask)
    return folder


def query_of(folder: Path, **keys):
    return make_query(task="segmentation", classes=CLASSES, input_size=16, data=folder, **keys)


def test_miou_is_the_mean_over_classes_of_labelled_pixels():
    counts = TASK.tallies([prediction_of("0110", "0000")], [labels_of("0111", "000.")], CLASSES)
    assert counts[0].tolist() == [[4, 2], [5, 3]]
    assert TASK.metric_of(counts.sum(axis=0)) == pytest.approx((4 / 5 + 2 / 3) / 2)
    none = TASK.tallies([None], [labels_of("01")], CLASSES)
    assert none[0].tolist() == [[0, 0], [1, 1]] and TASK.metric_of(none[0]) == 0


@pytest.mark.parametrize("preprocess", RESIZES, ids=lambda one: one.resize)
def test_masks_come_back_to_the_pixels_of_the_frame(preprocess):
    mask = np.zeros((90, 160), np.uint8)
    mask[30:60, 60:100] = 1
    label = prepare_mask(mask, preprocess)
    (target,) = SegmentationObjective().targets([label], [(160, 90)], CLASSES, preprocess)
    assert target.shape == (24, 32)
    logits = torch.nn.functional.one_hot(target.long().clamp(max=1), 2).permute(2, 0, 1)[None].float()
    (found,) = TASK.predictions(None, logits.numpy(), [(160, 90)], CLASSES, preprocess=preprocess)
    assert TASK.metric_of(TASK.tallies([found], [label], CLASSES)[0]) == 1
    (segment,) = found.in_frame(10, 20, (200, 120)).to_record()["segments"]
    whole = decode_rle(segment["mask"]["counts"], tuple(segment["mask"]["size"]))
    rows, columns = whole.nonzero()
    assert whole.shape == (120, 200) and segment["class"] == "person" and segment["area"] == whole.sum()
    assert abs(rows.min() - 50) <= 4 and abs(columns.min() - 70) <= 5 and abs(columns.max() - 109) <= 5


@pytest.mark.parametrize("size", [(7, 5), (24, 32), (65, 65)])
def test_classes_of_pixels_are_those_of_resized_logits(size):
    logits = np.random.default_rng(0).normal(size=(5, 24, 32)).astype(np.float32)
    resized = torch.nn.functional.interpolate(torch.from_numpy(logits)[None], size, mode="bilinear")
    wanted = resized.argmax(dim=1)[0].numpy()
    assert np.mean(choose_classes(logits, size) != wanted) <= 0.002


def test_masks_are_read_beside_their_pictures(tmp_path):
    mask = np.zeros((32, 32), np.uint8)
    mask[:, 16:] = 1
    split = load_split(query_of(write_masks(tmp_path, mask, count=2)), "train")
    assert len(split) == 2 and split.labels is not None and isinstance(split.labels[0], MaskLabels)
    assert np.array_equal(split.labels[0].mask, mask[::2, ::2])


def test_masks_of_0_and_255_are_two_classes(tmp_path):
    mask = np.zeros((16, 16), np.uint8)
    mask[:8] = IGNORED
    with collect_notes() as notes:
        split = load_split(query_of(write_masks(tmp_path, mask)), "train")
    assert split.labels is not None and isinstance(split.labels[0], MaskLabels)
    assert (split.labels[0].mask == (mask == IGNORED)).all()
    assert any("255 is taken as 'person'" in str(note) for note in notes)


@pytest.mark.parametrize(("mask", "text"), [
    (np.full((16, 16), 7, np.uint8), "holds the value 7"), (np.zeros((8, 16), np.uint8), "its picture"),
    (np.zeros((16, 16, 3), np.uint8), "no mask of 8 bits"), (None, "masks are missing"),
])  # fmt: skip
def test_masks_that_do_not_fit_are_refused(tmp_path, mask, text):
    write_masks(tmp_path, np.zeros((16, 16), np.uint8))
    file = tmp_path / "train" / "masks" / "0.png"
    file.unlink() if mask is None else cv2.imwrite(str(file), mask)
    with pytest.raises(InputError, match=text):
        load_split(query_of(tmp_path), "train")


def test_evidence_needs_two_classes_in_the_frames(tmp_path):
    query = query_of(tmp_path)
    write_masks(tmp_path, np.zeros((16, 16), np.uint8), count=25)
    split = load_split(query, "train")
    assert split.labels is not None and "one answer (background)" in find_gap(query, split, split.labels)
    both = [labels_of("01", "00")] * 25
    assert find_gap(query, split, both) == ""


@pytest.mark.parametrize("name", ["lraspp_mobilenet_v3_large", "deeplabv3_mobilenet_v3_large", "fcn_resnet50"])
def test_zoo_segmenters_have_torchvisions_keys(name):
    model = zoo.build(name, CLASSES, {}, (64, 96), "segmentation", "meta")
    assert model.eval()(torch.empty(1, 3, 64, 96, device="meta")).shape == (1, 2, 64, 96)
    whole = torchvision.models.get_model(name, weights=None, weights_backbone=None, num_classes=2)
    assert whole.state_dict().keys() == model.state_dict().keys()


def test_module_with_other_outputs_is_refused():
    with pytest.raises(InputError, match="not with logits"):
        zoo.build("tests.merger.tiny:tiny_net", CLASSES, {}, 24, "segmentation")
