"""Preprocessing: where frames lie in a network's input, boxes there and back, normalisation."""

from __future__ import annotations

import cv2
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchvision.transforms import v2

from models.errors import InputError
from models.preprocess import Preprocess, Size
from models.zoo import preprocess_of
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
    wanted = v2.Compose([v2.Resize(int(side / fraction), antialias=True), v2.CenterCrop(side)])
    found = Preprocess((side, side), "center-crop", fraction).resize_frame(frame)
    assert torch.equal(found, wanted(torch.from_numpy(frame).permute(2, 0, 1)))


@given(frame=FRAMES, rows=SIDES, columns=SIDES, mode=st.sampled_from(["stretch", "letterbox", "center-crop"]))
def test_boxes_of_the_input_go_to_the_frame_and_back(frame, rows: int, columns: int, mode) -> None:
    preprocess = Preprocess((rows, columns), mode, 0.9)
    left, top, wide, high = preprocess.place(frame)
    seen = [max(0, left) / columns, max(0, top) / rows, min(1, (left + wide) / columns), min(1, (top + high) / rows)]
    # A letterbox's sides are rounded to pixels, its scale is not: the last pixel may be the frame's in part.
    whole = torch.tensor([seen], dtype=torch.float64)
    edges = preprocess.from_frame(torch.tensor([[0.0, 0.0, 1.0, 1.0]], dtype=torch.float64), frame)
    whole = torch.cat([whole[:, :2], torch.minimum(whole[:, 2:], edges[:, 2:])], dim=1)
    boxes = (whole + whole[:, [2, 3, 0, 1]]) / 4 + whole / 2
    back = preprocess.from_frame(preprocess.to_frame(boxes, frame), frame)
    torch.testing.assert_close(back, boxes, atol=1e-9, rtol=0)


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
    fractions = torch.tensor([box]) / torch.tensor([width, height, width, height])
    x0, y0, x1, y1 = (
        preprocess.from_frame(fractions, frame)[0].clamp(0, 1) * torch.tensor([columns, rows] * 2)
    ).tolist()
    white = preprocess.resize_frame(picture)[0].float() / 255
    assert white.shape == (rows, columns)
    blurred = 2 * (1 + max(1, rows / height, columns / width)) * ((x1 - x0) + (y1 - y0) + 2)
    assert abs(float(white.sum()) - (x1 - x0) * (y1 - y0)) <= blurred


@pytest.mark.parametrize("size", [(416, 416), (300, 200), (720, 1280)])
def test_frame_without_antialias_is_resized_by_opencv(size: Size) -> None:
    frame = np.random.default_rng(0).integers(0, 256, (800, 1400, 3), np.uint8)[40:760, 60:1340]
    wanted = cv2.resize(frame, size[::-1]).transpose(2, 0, 1)
    assert np.array_equal(Preprocess(size, antialias=False).resize_frame(frame).numpy(), wanted)


def test_letterbox_at_the_top_left_follows_yolox() -> None:
    preprocess = Preprocess((416, 416), "letterbox", anchor="top-left")
    assert preprocess.place((768, 431)) == (0, 0, 416, 233)
    ratio = 416 / 768
    box = torch.tensor([[100.0, 50.0, 200.0, 230.0]], dtype=torch.float64) / 416
    found = preprocess.to_frame(box, (768, 431)) * torch.tensor([768, 431, 768, 431])
    torch.testing.assert_close(found, box * 416 / ratio)


def test_letterbox_of_a_part_leaves_a_margin_as_super_gradients_does() -> None:
    preprocess = Preprocess((640, 640), "letterbox", crop_fraction=636 / 640)
    assert preprocess.place((1280, 720)) == (2, 141, 636, 358)
    corners = preprocess.from_frame(torch.tensor([[0.0, 0.0, 1.0, 1.0]]), (1280, 720)) * 640
    assert torch.allclose(corners, torch.tensor([[2.0, 141.0, 638.0, 498.75]]))


def test_letterbox_fills_the_borders_with_pad() -> None:
    image = Preprocess((40, 40), "letterbox", pad=7).resize_frame(np.full((10, 20, 3), 200, np.uint8))
    assert image[:, :10].unique().tolist() == [7] and image[:, 30:].unique().tolist() == [7]
    assert image[:, 10:30].unique().tolist() == [200]


@pytest.mark.parametrize("scale", [1, 255])
@pytest.mark.parametrize("channels", ["rgb", "bgr"])
def test_normalise_scales_then_subtracts_in_the_order_of_the_channels(scale, channels) -> None:
    mean, std = (0.1 * scale, 0.2 * scale, 0.3 * scale), (0.4, 0.5, 0.6)
    batch = torch.randint(0, 256, (2, 3, 4, 5), dtype=torch.uint8)
    ordered = batch if channels == "rgb" else batch[:, [2, 1, 0]]
    wanted = (ordered * (scale / 255) - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    found = Preprocess((4, 5), scale=scale, mean=mean, std=std, channels=channels).normalise(batch)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-5)


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
