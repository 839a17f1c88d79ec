"""Preprocessing: where frames lie in a network's input, boxes there and back, normalisation."""

from __future__ import annotations

import cv2
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from gemel.models.antialias import BAND_BYTES, resize_antialiased, resize_by_pillow, resize_by_simd
from gemel.models.errors import InputError
from gemel.models.preprocess import Preprocess, Size
from gemel.models.tensors import normalise_frames
from gemel.models.zoo import preprocess_of
from tests.models.queries import make_query

SIDES = st.integers(16, 700)
FRAMES = st.tuples(st.integers(16, 2000), st.integers(16, 2000))


@pytest.mark.parametrize(
    ("frame", "size", "placed"),
    [  # (width, height), (H, W) -> left, top, width, height, by Ultralytics' LetterBox
        ((1920, 1080), (640, 640), (0, 140, 640, 360)),
        ((1280, 720), (416, 416), (0, 91, 416, 234)),
        ((720, 1280), (384, 640), (212, 0, 216, 384)),
        ((1000, 333), (640, 640), (0, 213, 640, 213)),
        ((640, 480), (480, 640), (0, 0, 640, 480)),
    ],
)
def test_letterbox_follows_ultralytics(frame: tuple[int, int], size: Size, placed: tuple[int, ...]) -> None:
    assert Preprocess(size, "letterbox").place(frame) == placed


@given(width=SIDES, height=SIDES, side=st.integers(16, 260), fraction=st.sampled_from([0.875, 0.95, 1.0]))
def test_center_crop_follows_torchvision(width: int, height: int, side: int, fraction: float) -> None:
    frame = np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8)
    transform = v2.Compose([v2.Resize(int(side / fraction), antialias=True), v2.CenterCrop(side)])
    wanted = transform(torch.from_numpy(frame).permute(2, 0, 1)).numpy()
    found = Preprocess((side, side), "center-crop", fraction).resize_frame(frame)
    assert np.abs(found.astype(int) - wanted).max() <= 1


@given(frame=FRAMES, rows=SIDES, columns=SIDES, mode=st.sampled_from(["stretch", "letterbox", "center-crop"]))
def test_boxes_of_the_input_go_to_the_frame_and_back(frame, rows: int, columns: int, mode) -> None:
    preprocess = Preprocess((rows, columns), mode, 0.9)
    left, top, wide, high = preprocess.place(frame)
    seen = [max(0, left) / columns, max(0, top) / rows, min(1, (left + wide) / columns), min(1, (top + high) / rows)]
    # A letterbox's sides are rounded to pixels, its scale is not: the last pixel may be the frame's in part.
    whole = np.array([seen])
    edges = preprocess.from_frame(np.array([[0.0, 0.0, 1.0, 1.0]]), frame)
    whole = np.concatenate([whole[:, :2], np.minimum(whole[:, 2:], edges[:, 2:])], axis=1)
    boxes = (whole + whole[:, [2, 3, 0, 1]]) / 4 + whole / 2
    back = preprocess.from_frame(preprocess.to_frame(boxes, frame), frame)
    np.testing.assert_allclose(back, boxes, atol=1e-9, rtol=0)


@given(
    frame=st.tuples(SIDES, SIDES),
    rows=st.integers(16, 200),
    columns=st.integers(16, 200),
    mode=st.sampled_from(["letterbox", "center-crop"]),
)
def test_a_drawn_object_lies_where_its_box_says(frame, rows: int, columns: int, mode) -> None:
    """The middle quarter of a black frame is white; its box, taken to the input, holds the white pixels there."""
    (width, height), preprocess = frame, Preprocess((rows, columns), mode, 0.9, pad=0)
    picture = np.zeros((height, width, 3), np.uint8)
    box = [width // 4, height // 4, width - width // 4, height - height // 4]
    picture[box[1] : box[3], box[0] : box[2]] = 255
    fractions = np.array([box]) / np.array([width, height, width, height])
    x0, y0, x1, y1 = preprocess.from_frame(fractions, frame)[0].clip(0, 1) * np.array([columns, rows] * 2)
    white = preprocess.resize_frame(picture)[0].astype(float) / 255
    assert white.shape == (rows, columns)
    blurred = 2 * (1 + max(1, rows / height, columns / width)) * ((x1 - x0) + (y1 - y0) + 2)
    assert abs(float(white.sum()) - (x1 - x0) * (y1 - y0)) <= blurred


@pytest.mark.parametrize("size", [(416, 416), (300, 200), (720, 1280)])
def test_frame_without_antialias_is_resized_by_opencv(size: Size) -> None:
    frame = np.random.default_rng(0).integers(0, 256, (800, 1400, 3), np.uint8)[40:760, 60:1340]
    wanted = cv2.resize(frame, size[::-1]).transpose(2, 0, 1)
    assert np.array_equal(Preprocess(size, antialias=False).resize_frame(frame), wanted)


def test_letterbox_at_the_top_left_follows_yolox() -> None:
    preprocess = Preprocess((416, 416), "letterbox", anchor="top-left")
    assert preprocess.place((768, 431)) == (0, 0, 416, 233)
    ratio = 416 / 768
    box = np.array([[100.0, 50.0, 200.0, 230.0]]) / 416
    found = preprocess.to_frame(box, (768, 431)) * np.array([768, 431, 768, 431])
    np.testing.assert_allclose(found, box * 416 / ratio)


def test_letterbox_of_a_part_leaves_a_margin_as_super_gradients_does() -> None:
    preprocess = Preprocess((640, 640), "letterbox", crop_fraction=636 / 640)
    assert preprocess.place((1280, 720)) == (2, 141, 636, 358)
    corners = preprocess.from_frame(np.array([[0.0, 0.0, 1.0, 1.0]]), (1280, 720)) * 640
    np.testing.assert_allclose(corners, [[2.0, 141.0, 638.0, 498.75]])


def test_letterbox_fills_the_borders_with_pad() -> None:
    image = Preprocess((40, 40), "letterbox", pad=7).resize_frame(np.full((10, 20, 3), 200, np.uint8))
    assert np.unique(image[:, :10]).tolist() == [7] and np.unique(image[:, 30:]).tolist() == [7]
    assert np.unique(image[:, 10:30]).tolist() == [200]


@pytest.mark.parametrize("scale", [1, 255])
@pytest.mark.parametrize("channels", ["rgb", "bgr"])
def test_normalise_scales_then_subtracts_in_the_order_of_the_channels(scale, channels) -> None:
    mean, std = (0.1 * scale, 0.2 * scale, 0.3 * scale), (0.4, 0.5, 0.6)
    batch = torch.randint(0, 256, (2, 3, 4, 5), dtype=torch.uint8)
    ordered = batch if channels == "rgb" else batch[:, [2, 1, 0]]
    wanted = (ordered * (scale / 255) - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    preprocess = Preprocess((4, 5), scale=scale, mean=mean, std=std, channels=channels)
    found = preprocess.normalise(batch.numpy())
    assert found.flags.c_contiguous
    torch.testing.assert_close(torch.from_numpy(found), wanted, atol=1e-4, rtol=1e-5)
    assert torch.equal(normalise_frames(preprocess, batch), torch.from_numpy(found))


@pytest.mark.parametrize("size", [(640, 360), (300, 200), (33, 470), (1, 1), (900, 900)])
def test_frame_with_antialias_is_resized_as_by_torchvision(size: tuple[int, int]) -> None:
    frame = np.random.default_rng(0).integers(0, 256, (360, 640, 3), np.uint8)
    frame = cv2.GaussianBlur(frame, (0, 0), 1.0)
    wanted = functional.resize(torch.from_numpy(frame).permute(2, 0, 1), list(size[::-1]), antialias=True)
    for resize in (resize_antialiased, resize_by_pillow):
        found = resize(frame, size).transpose(2, 0, 1)
        assert found.dtype == np.uint8
        assert np.abs(found.astype(int) - wanted.numpy()).max() <= 1


def test_resizers_of_all_processors_differ_by_one_at_most() -> None:
    pytest.importorskip("cykooz_resizer")
    frame = np.random.default_rng(0).integers(0, 256, (270, 480, 3), np.uint8)
    by_simd, by_pillow = resize_by_simd(frame, (224, 96)), resize_by_pillow(frame, (224, 96))
    assert np.abs(by_simd.astype(int) - by_pillow).max() <= 1


@pytest.mark.parametrize("size", [(224, 224), (37, 700)])
def test_frame_that_is_resized_in_bands_has_no_seams(size: tuple[int, int]) -> None:
    pytest.importorskip("cykooz_resizer")
    frame = np.random.default_rng(0).integers(0, 256, (700, 1000, 3), np.uint8)
    assert frame.nbytes > 2 * BAND_BYTES
    by_simd, by_pillow = resize_by_simd(frame, size), resize_by_pillow(frame, size)
    assert np.abs(by_simd.astype(int) - by_pillow).max() <= 1


def test_a_prepared_frame_is_contiguous_and_of_one_batch() -> None:
    """Also of a frame that is itself no contiguous array: a part of a larger one."""
    frame = np.random.default_rng(0).integers(0, 256, (90, 160, 3), np.uint8)[5:85, 10:150]
    for preprocess in (Preprocess((32, 48)), Preprocess((80, 140)), Preprocess((32, 48), "letterbox", antialias=False)):
        found = preprocess(frame)
        assert found.dtype == np.float32 and found.shape == (1, 3, *preprocess.size) and found.flags.c_contiguous


def test_preprocess_of_a_query_precedes_that_of_the_zoo() -> None:
    own = preprocess_of(make_query(model="resnet18", input_size=32))
    some = preprocess_of(make_query(model="resnet18", input_size=(32, 48), preprocess={"channels": "bgr"}))
    assert (some.size, some.channels, some.mean) == ((32, 48), "bgr", own.mean)
    whole = Preprocess((8, 8), "letterbox", mean=(0, 0, 0), std=(1, 1, 1))
    assert preprocess_of(make_query(model="resnet18", preprocess=whole)) is whole


def test_a_model_that_nothing_says_how_to_feed_is_refused_with_the_key() -> None:
    keys = {"model": "timm/unheard_of", "input_size": 64}
    with pytest.raises(InputError, match=r"preprocess \(gate\): nothing says the mean and the std .* unheard_of"):
        preprocess_of(make_query(**keys))
    asked = {"mean": (0, 0, 0), "std": (1, 1, 1), "scale": 255}
    assert preprocess_of(make_query(**keys, preprocess=asked)).size == (64, 64)
