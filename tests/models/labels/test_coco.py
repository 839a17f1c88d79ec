"""COCO annotations against their pictures: what is read, scaled, clipped, left out with a note, or refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pydantic import BaseModel

from gemel.models.errors import InputError
from gemel.models.files.pictures import LabelledPicture, read_picture
from gemel.models.labels.coco import (
    REFUSED_KEYS,
    UNREAD_KEYS,
    CocoFile,
    _CocoAnnotation,
    _CocoCategory,
    _CocoImage,
    read_coco,
)
from gemel.models.notes import collect_notes
from gemel.models.predictions import Box, BoxLabels

WIDTH, HEIGHT = 120, 80
PICTURES = 4
Document = dict[str, Any]


def make_document() -> Document:
    """Four pictures, each with a car of x 10 * (n + 1), y 20, 30 x 25 pixels and a bus."""
    return {
        "images": [{"id": n, "file_name": f"yard__{n}.png", "width": WIDTH, "height": HEIGHT} for n in range(PICTURES)],
        "categories": [{"id": 3, "name": "car"}, {"id": 9, "name": "bus"}],
        "annotations": [
            {"id": 2 * n + place, "image_id": n, "category_id": category, "bbox": box, "iscrowd": 0}
            for n in range(PICTURES)
            for place, (category, box) in enumerate(((3, [10 * (n + 1), 20, 30, 25]), (9, [70, 40, 40, 30])))
        ],
    }


CARS = [BoxLabels(("car",), ((10.0 * (n + 1), 20.0, 10.0 * (n + 1) + 30, 45.0),)) for n in range(PICTURES)]


def write_pictures(folder: Path, size: tuple[int, int] = (WIDTH, HEIGHT), orientation: int = 1) -> None:
    (folder / "images").mkdir(parents=True, exist_ok=True)
    exif = Image.Exif()
    exif[0x0112] = orientation
    for n in range(PICTURES):
        Image.new("RGB", size, (90, 90, 90)).save(folder / f"images/yard__{n}.png", exif=exif)


def write_document(folder: Path, document: Document, encoding: str = "utf-8") -> None:
    (folder / "annotations.json").write_bytes(json.dumps(document).encode(encoding))


def read_pictures(folder: Path) -> list[LabelledPicture]:
    return read_coco(CocoFile(folder / "annotations.json", folder / "images"), {"car": "car"}, "gate")


def read_cars(folder: Path) -> tuple[list[BoxLabels], list[str]]:
    """The labels of class car, and the notes without the path of the file."""
    with collect_notes() as notes:
        found = read_pictures(folder)
    prefix = f"{folder / 'annotations.json'}: "
    assert all(note.startswith(prefix) for note in notes)
    labels = [picture.label for picture in found if isinstance(picture.label, BoxLabels)]
    assert len(labels) == len(found)
    return labels, [note.removeprefix(prefix) for note in notes]


def read_changed(folder: Path, change: Callable[[Document], object]) -> tuple[list[BoxLabels], list[str]]:
    document = make_document()
    change(document)
    write_pictures(folder)
    write_document(folder, document)
    return read_cars(folder)


def change_each(key: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Document], None]:
    def change_document(document: Document) -> None:
        for entry in document[key]:
            change(entry)

    return change_document


def add_box(*bbox: float, **more: Any) -> Callable[[Document], None]:
    """A car in the first picture beside the others."""
    return lambda document: document["annotations"].append({"image_id": 0, "category_id": 3, "bbox": bbox, **more})


def use_polygons(annotation: dict[str, Any], **bbox: Any) -> None:
    x, y, width, height = annotation.pop("bbox")
    corner = [x + width, y + height, x, y + height - 1]
    annotation |= {"segmentation": [[x, y + 1, x + width - 1, y, x + 2, y + 2], corner], **bbox}


def write_ids(document: Document, spell: Callable[[int], object]) -> None:
    for image in document["images"]:
        image["id"] = spell(image["id"])
    for annotation in document["annotations"]:
        annotation["image_id"] = spell(annotation["image_id"])


HARMLESS: dict[str, Callable[[Document], object]] = {
    "no sizes": change_each("images", lambda one: [one.pop("width"), one.pop("height")]),
    "sizes of zero": change_each("images", lambda one: one.update(width=0, height=None)),
    "sizes as text": change_each("images", lambda one: one.update(width=str(WIDTH), height=f"{HEIGHT}.0")),
    "polygons": change_each("annotations", use_polygons),
    "one polygon as a flat list": change_each(
        "annotations",
        lambda one: [use_polygons(one), one.update(segmentation=one["segmentation"][0] + one["segmentation"][1])],
    ),
    "polygons and an empty bbox": change_each("annotations", lambda one: use_polygons(one, bbox=[])),
    "polygons and a bbox of null": change_each("annotations", lambda one: use_polygons(one, bbox=None)),
    "a mask beside the bbox": change_each("annotations", lambda one: one.update(segmentation={"counts": [1, 9]})),
    "ids as text": lambda document: write_ids(document, lambda n: f"{n:06}"),
    "ids as names": lambda document: write_ids(document, lambda n: f"picture {n}"),
    "ids as floats": lambda document: write_ids(document, float),
    "category ids as text": change_each("annotations", lambda one: one.update(category_id=str(one["category_id"]))),
    "an area that is no number": change_each("annotations", lambda one: one.update(area=math.nan)),
    "no iscrowd": change_each("annotations", lambda one: one.pop("iscrowd")),
    "iscrowd of null": change_each("annotations", lambda one: one.update(iscrowd=None)),
    "box of another class is flat": change_each(
        "annotations", lambda one: one["category_id"] == 9 and one.update(bbox=[1, 1, 0, 0])
    ),
    "box ends by rounding outside": lambda document: document["annotations"][1].update(bbox=[79.5, 50, 41, 30.4]),
}


@pytest.mark.parametrize("kind", HARMLESS)
def test_read_coco_takes_harmless_files_without_a_note(tmp_path: Path, kind: str) -> None:
    assert read_changed(tmp_path, HARMLESS[kind]) == (CARS, [])


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_read_coco_takes_a_file_with_a_byte_order_mark(tmp_path: Path, encoding: str) -> None:
    write_pictures(tmp_path)
    write_document(tmp_path, make_document(), encoding)
    assert read_cars(tmp_path) == (CARS, [])


@pytest.mark.parametrize(
    "before",
    ["images/", "./images/", "train/images/", "/home/me/images/", "..\\upload\\7\\", "C:\\data\\", "https://a.org/b/",
     "/data/local-files/?d=images/", "../../"],
)  # fmt: skip
def test_read_coco_finds_pictures_by_the_last_part_of_their_name(tmp_path: Path, before: str) -> None:
    labels, notes = read_changed(
        tmp_path, change_each("images", lambda one: one.update(file_name=before + one["file_name"]))
    )
    assert labels == CARS
    assert notes == [f"4 file names have another folder before them: {before}yard__0.png is read as images/yard__0.png"]


def test_read_coco_finds_pictures_of_quoted_addresses_and_of_folders(tmp_path: Path) -> None:
    document = make_document()
    write_pictures(tmp_path)
    for n in range(2):
        (tmp_path / f"images/yard__{n}.png").rename(tmp_path / f"images/yard__{n} a.png")
        document["images"][n]["file_name"] = f"https://a.org/yard__{n}%20a.png?key=a/b"
    (tmp_path / "images/zone").mkdir()
    (tmp_path / "images/yard__3.png").rename(tmp_path / "images/zone/yard__3.png")
    document["images"][3]["file_name"] = "zone/yard__3.png"
    write_document(tmp_path, document)
    labels, notes = read_cars(tmp_path)
    assert labels == CARS and len(notes) == 1 and notes[0].startswith("2 file names")


@pytest.mark.parametrize(
    ("change", "note"),
    [
        (add_box(5, 5, 0, 9), "1 without width or height (first annotations[8])"),
        (add_box(5, 5, 9, -4), "1 without width or height (first annotations[8])"),
        (add_box(5, math.nan, 9, 4), "1 without width or height (first annotations[8])"),
        (add_box(5, 5, math.inf, 4), "1 without width or height (first annotations[8])"),
        (add_box(120, 5, 9, 4), "1 outside the picture (first annotations[8])"),
        (add_box(5, -30, 9, 30), "1 outside the picture (first annotations[8])"),
        (add_box(0.2, 0.2, 0.5, 0.5), "1 within the first pixel (first annotations[8])"),
        (add_box(5, 5, 9, 4, image_id=77), "1 of pictures that are not listed (first annotations[8])"),
        (add_box(5, 5, 9, 4, category_id=77), "1 of categories that are not listed (first annotations[8])"),
        (add_box(10, 20, 30, 25), "1 exact duplicates (first annotations[8])"),
        (add_box(segmentation={"counts": [0, 4], "size": [2, 3]}), "1 without bbox, polygons or mask (first annota"),
        (
            lambda document: [add_box(*box)(document) for box in ((5, 5, 0, 9), (5, 5, 0, 8), (500, 1, 9, 9))],
            "2 without width or height (first annotations[8]), 1 outside the picture (first annotations[10])",
        ),
    ],
)  # fmt: skip
def test_read_coco_leaves_out_what_is_no_box_with_one_note(tmp_path: Path, change, note: str) -> None:
    labels, (found,) = read_changed(tmp_path, change)
    assert labels == CARS and found.startswith(f"annotations are left out of training and scoring (query gate): {note}")
    assert found.endswith("; correct them, or take them out")


@pytest.mark.parametrize(
    ("bbox", "clipped"),
    [((-10, 60, 30, 40), (0.0, 60.0, 20.0, 80.0)), ((100, -5, 50, 30), (100.0, 0.0, 120.0, 25.0))],
)
def test_read_coco_clips_boxes_to_the_picture_with_one_note(tmp_path: Path, bbox: Box, clipped: Box) -> None:
    labels, notes = read_changed(tmp_path, add_box(*bbox))
    assert labels == [BoxLabels(("car", "car"), (*CARS[0].boxes, clipped)), *CARS[1:]]
    assert len(notes) == 1 and notes[0].startswith(
        "1 boxes end outside their picture and are clipped to it (query gate)"
    )


@pytest.mark.parametrize("iscrowd", [1, True, "1", 1.0])
def test_read_coco_keeps_crowds_apart_from_objects(tmp_path: Path, iscrowd: object) -> None:
    labels, notes = read_changed(tmp_path, add_box(0, 0, 60, 90, iscrowd=iscrowd, segmentation={"counts": "a"}))
    crowd = BoxLabels(("car",), ((0.0, 0.0, 60.0, 80.0),))
    assert labels == [BoxLabels(*(CARS[0].classes, CARS[0].boxes), crowd), *CARS[1:]]
    assert notes[-1].startswith(
        "1 regions (iscrowd, ignore or difficult) are no objects to train on or to find (query gate)"
    )


@pytest.mark.parametrize("size", [(60, 40), (240, 160), (90, 60), (61, 40)])
def test_read_coco_scales_boxes_to_resized_pictures_with_one_note(tmp_path: Path, size: tuple[int, int]) -> None:
    write_pictures(tmp_path, size)
    write_document(tmp_path, make_document())
    labels, notes = read_cars(tmp_path)
    factors = np.tile(np.divide(size, (WIDTH, HEIGHT)), 2)
    for found, label in zip(labels, CARS, strict=True):
        assert found.boxes == pytest.approx(np.array(label.boxes) * factors)
    shown = f"yard__0.png has {size[0]} x {size[1]} pixels, the file says 120 x 80"
    assert len(notes) == 1
    assert notes[0].startswith(f"boxes of 4 of 4 pictures are scaled to their size: {shown}; ")


def test_read_coco_scales_only_pictures_of_another_size(tmp_path: Path) -> None:
    write_pictures(tmp_path)
    Image.new("RGB", (WIDTH // 2, HEIGHT // 2)).save(tmp_path / "images/yard__2.png")
    write_document(tmp_path, make_document())
    labels, notes = read_cars(tmp_path)
    assert labels[2].boxes == ((15.0, 10.0, 30.0, 22.5),) and labels[3] == CARS[3]
    assert notes[0].startswith("boxes of 1 of 4 pictures are scaled")


@pytest.mark.parametrize(
    ("size", "orientation", "shown"),
    [
        ((WIDTH, HEIGHT), 6, "yard__0.png has 80 x 120 pixels, the file says 120 x 80 (an EXIF tag turns it)"),
        ((WIDTH, HEIGHT), 5, "yard__0.png has 80 x 120 pixels, the file says 120 x 80 (an EXIF tag turns it)"),
        ((HEIGHT, WIDTH), 1, "yard__0.png has 80 x 120 pixels, the file says 120 x 80 (so do 3 more)"),
        ((WIDTH, WIDTH), 1, "yard__0.png has 120 x 120 pixels, the file says 120 x 80"),
        ((WIDTH, HEIGHT + 8), 1, "yard__0.png has 120 x 88 pixels, the file says 120 x 80"),
    ],
)
def test_read_coco_refuses_pictures_of_another_shape(tmp_path: Path, size, orientation: int, shown: str) -> None:
    write_pictures(tmp_path, size, orientation)
    write_document(tmp_path, make_document())
    with pytest.raises(InputError) as caught:
        read_cars(tmp_path)
    text = str(caught.value)
    assert str(tmp_path / "annotations.json") in text and shown in text and "so do 3 more" in text
    assert "label the pictures as they are shown, upright" in text and "\n" not in text


@pytest.mark.parametrize(
    ("size", "orientation"),
    [((HEIGHT, WIDTH), 6), ((WIDTH, HEIGHT), 3), ((WIDTH, HEIGHT), 2)],
    ids=["sizes are of the turned picture", "upside down", "mirrored"],
)
def test_read_coco_takes_boxes_of_turned_pictures_with_one_note(tmp_path: Path, size, orientation: int) -> None:
    write_pictures(tmp_path, size, orientation)
    write_document(tmp_path, make_document())
    with collect_notes() as notes:
        pictures = read_pictures(tmp_path)
        frames = [picture.read() for picture in pictures]
    assert [picture.label for picture in pictures] == CARS and frames[0].shape == (HEIGHT, WIDTH, 3)
    assert len(notes) == 1 and "4 pictures are turned or mirrored by an EXIF tag" in notes[0]


def encode_mask(box: Box, packed: bool) -> dict[str, Any]:
    """A mask of the whole box but a corner, as pycocotools encodes it."""
    mask = np.zeros((HEIGHT, WIDTH), np.uint8, order="F")
    x, y, width, height = (int(side) for side in box)
    mask[y : y + height, x : x + width] = 1
    mask[y, x] = 0
    coded = pytest.importorskip("pycocotools.mask").encode(mask)
    runs = [0, *np.flatnonzero(np.diff(mask.ravel(order="F"))) + 1, mask.size]
    counts = coded["counts"].decode() if packed else [int(run) for run in np.diff(runs)]
    return {"size": list(mask.shape), "counts": counts}


@pytest.mark.parametrize("packed", [True, False])
def test_read_coco_takes_the_box_of_a_mask_without_bbox(tmp_path: Path, packed: bool) -> None:
    def use_masks(one: dict[str, Any]) -> None:
        one["segmentation"] = encode_mask(one.pop("bbox"), packed)

    assert read_changed(tmp_path, change_each("annotations", use_masks)) == (CARS, [])


def scatter_boxes(width: int, height: int, side: float, change: Callable[..., object], count: int = 60) -> Document:
    """A document of boxes at random places of pictures of this size, each changed."""
    random = np.random.default_rng(3)
    starts = random.uniform(0, [width - side, height - side], (count, 2)).tolist()
    images = [{"id": n, "file_name": f"yard__{n}.png", "width": width, "height": height} for n in range(PICTURES)]
    rows = [{"image_id": at % PICTURES, "category_id": 3, "bbox": change(*one, side)} for at, one in enumerate(starts)]
    return {"images": images, "categories": [{"id": 3, "name": "car"}], "annotations": rows}


def divide_box(whole: float, x: float, y: float, side: float, width: int, height: int) -> list[float]:
    return [whole * x / width, whole * y / height, whole * side / width, whole * side / height]


FORMS: dict[str, tuple[Callable[[int, int], Callable[..., object]], str]] = {
    "centres": (lambda w, h: lambda x, y, s: [x + s / 2, y + s / 2, s, s], "fit as centre x, centre y, width, height"),
    "corners": (lambda w, h: lambda x, y, s: [x, y, x + s, y + s], "fit as x0, y0, x1, y1"),
    "percents": (lambda w, h: lambda x, y, s: divide_box(100, x, y, s, w, h), "percents"),
    "whole percents": (lambda w, h: lambda x, y, s: [int(side) for side in divide_box(100, x, y, s, w, h)], "percents"),
    "fractions": (lambda w, h: lambda x, y, s: divide_box(1, x, y, s, w, h), "fractions"),
}  # fmt: skip


@pytest.mark.parametrize(("width", "height", "side"), [(640, 480, 60), (320, 240, 30), (64, 48, 12), (1920, 1080, 90)])
@pytest.mark.parametrize("form", FORMS)
def test_read_coco_refuses_boxes_of_another_form(tmp_path: Path, form: str, width: int, height: int, side: int) -> None:
    change, message = FORMS[form]
    write_pictures(tmp_path, (width, height))
    write_document(tmp_path, scatter_boxes(width, height, side, change(width, height)))
    with pytest.raises(InputError, match=message) as caught:
        read_cars(tmp_path)
    assert "\n" not in str(caught.value) and caught.value.hint


@pytest.mark.parametrize(("width", "height", "side"), [(640, 480, 60), (320, 240, 30), (64, 48, 12), (120, 100, 10)])
def test_read_coco_takes_scattered_boxes_without_a_note(tmp_path: Path, width: int, height: int, side: int) -> None:
    write_pictures(tmp_path, (width, height))
    write_document(tmp_path, scatter_boxes(width, height, side, lambda x, y, s: [x, y, s, s]))
    labels, notes = read_cars(tmp_path)
    assert sum(len(label.boxes) for label in labels) == 60 and notes == []


def test_read_coco_clips_boxes_that_some_pictures_cut_off(tmp_path: Path) -> None:
    write_pictures(tmp_path, (640, 480))
    boxes = scatter_boxes(660, 500, 40, lambda x, y, s: [x - 10, y - 10, s, s])
    write_document(tmp_path, {**boxes, "images": scatter_boxes(640, 480, 40, lambda *_: [])["images"]})
    _, notes = read_cars(tmp_path)
    assert len(notes) == 1 and "boxes end outside their picture and are clipped" in notes[0]


def scale_boxes(document: Document) -> None:
    for one in document["annotations"]:
        one["bbox"] = [value / side for value, side in zip(one["bbox"], (WIDTH, HEIGHT) * 2, strict=True)]


def write_corners(document: Document) -> None:
    for one in document["annotations"]:
        x, y, width, height = one["bbox"]
        one["bbox"] = [x, y, x + width, y + height]


def drop_sizes_of_larger_pictures(document: Document) -> None:
    for image in document["images"]:
        del image["width"], image["height"]
    for one in document["annotations"]:
        one["bbox"] = [5 * value for value in one["bbox"]]


REFUSED: dict[str, tuple[Callable[[Document], object], str]] = {
    "fractions": (scale_boxes, "8 of 8 boxes lie within 0..1: these are fractions; COCO wants pixels"),
    "fractions but for one": (
        lambda document: [scale_boxes(document), document["annotations"][0].update(bbox=[10, 20, 30, 25])],
        "7 of 8 boxes lie within 0..1",
    ),
    "corners": (write_corners, "of 8 boxes leave their picture as x, y, width, height and fit as x0, y0, x1, y1"),
    "boxes of larger pictures": (drop_sizes_of_larger_pictures, "of 8 boxes lie outside their picture"),
    "no box at all": (
        change_each("annotations", lambda one: one.pop("bbox")),
        "none of its annotations is a box: 8 without bbox, polygons or mask",
    ),
    "nothing but crowds": (
        change_each("annotations", lambda one: one.update(iscrowd=1)),
        "all 4 annotations of query gate are crowd regions, so there is no object to find; set iscrowd and ignore to 0",
    ),
    "a number of 400 digits": (
        lambda document: document["annotations"][0].update(bbox=[10**400, 2, 3, 4]),
        "is not JSON: an integer of 401 digits",
    ),
    "ids of other pictures": (
        change_each("annotations", lambda one: one.update(image_id=f"p{one['image_id']}")),
        "none of its annotations is a box: 8 of pictures that are not listed",
    ),
    "a picture is missing": (
        lambda document: document["images"].append({"id": 50, "file_name": "gone.png"}),
        "1 of 5 pictures are not in .*images: gone.png; put them there, or take them and their annotations out",
    ),
    "a picture is listed twice": (
        lambda document: document["images"].append({"id": 50, "file_name": "a/yard__1.png"}),
        "1 pictures are listed more than once: yard__1.png; list each once",
    ),
    "an id occurs twice": (lambda document: document["images"].append(document["images"][0]), "an id occurs twice"),
    "an id is no number": (change_each("images", lambda one: one.update(id=1.5)), "an id is a whole number or a text"),
    "an id is true": (change_each("images", lambda one: one.update(id=True)), "an id is a whole number or a text"),
    "bbox of five numbers": (change_each("annotations", lambda one: one["bbox"].append(3)), r"annotations\[0\].bbox"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_read_coco_refuses_in_one_line(tmp_path: Path, kind: str) -> None:
    change, message = REFUSED[kind]
    with pytest.raises(InputError, match=message) as caught:
        read_changed(tmp_path, change)
    assert str(caught.value).startswith(str(tmp_path / "annotations.json")) and "\n" not in str(caught.value)


def test_read_coco_notes_boxes_that_may_be_percents(tmp_path: Path) -> None:
    document = make_document()
    for image in document["images"]:
        image.update(width=640, height=480)
    for one in document["annotations"]:
        one["bbox"] = [value / 2 for value in one["bbox"]]
    write_pictures(tmp_path, (640, 480))
    write_document(tmp_path, document)
    _, notes = read_cars(tmp_path)
    assert len(notes) == 1 and notes[0].startswith("all 8 boxes lie within 0..100")


def test_read_coco_takes_categories_of_one_name_as_one(tmp_path: Path) -> None:
    def rename(document: Document) -> None:
        document["categories"].append({"id": 10, "name": "car"})
        document["annotations"][0]["category_id"] = 10

    labels, notes = read_changed(tmp_path, rename)
    assert labels == CARS and notes == ["1 categories have the name of another and are taken as one with it"]


@pytest.mark.parametrize("data", [b"", b"\x89PNG and nothing more", b"GIF89a"])
def test_read_coco_names_a_picture_that_does_not_decode(tmp_path: Path, data: bytes) -> None:
    write_pictures(tmp_path)
    write_document(tmp_path, make_document())
    (tmp_path / "images/yard__1.png").write_bytes(data)
    with pytest.raises(InputError, match=r"yard__1\.png: is not an image that decodes"):
        read_cars(tmp_path)


def test_read_coco_notes_pictures_that_are_not_listed(tmp_path: Path) -> None:
    labels, notes = read_changed(tmp_path, lambda document: [document["images"].pop(), document["annotations"].pop()])
    assert labels == CARS[:3]
    assert notes[0].startswith("1 pictures of images are not listed and are left out: yard__3.png")


def test_labelled_picture_refuses_pixels_of_another_size(tmp_path: Path) -> None:
    write_pictures(tmp_path)
    write_document(tmp_path, make_document())
    picture = read_pictures(tmp_path)[1]
    assert np.array_equal(picture.read(), read_picture(picture.path))
    Image.new("RGB", (64, 64)).save(picture.path)
    with pytest.raises(InputError, match=r"yard__1\.png: has 64 x 64 pixels, and its header 120 x 80"):
        picture.read()


@pytest.mark.parametrize("key", ["ignore", "difficult"])
def test_read_coco_keeps_regions_to_be_ignored_apart_from_objects(tmp_path: Path, key: str) -> None:
    labels, notes = read_changed(tmp_path, add_box(0, 0, 60, 80, **{key: 1}))
    assert labels[0].crowds == BoxLabels(("car",), ((0.0, 0.0, 60.0, 80.0),)) and labels[1:] == CARS[1:]
    assert notes[-1].startswith("1 regions (iscrowd, ignore or difficult) are no objects")


GIVEN_KEYS: dict[str, Any] = {
    "bbox_mode": 0, "split": "train", "subset": "val", "attributes.rotation": 30.0, "neg_category_ids": [3],
    "not_exhaustive_category_ids": [9],
}  # fmt: skip


WRITTEN_KEYS: dict[str, dict[str, type[BaseModel]]] = {
    "images": {"id file_name width height split subset video_id ignore deleted neg_category_ids "
               "not_exhaustive_category_ids": _CocoImage},
    "categories": {"id name ignore": _CocoCategory},
    "annotations": {"image_id category_id bbox segmentation area iscrowd ignore difficult keypoints score confidence "
                    "bbox_mode rotation weight deleted ignored is_crowd crowd": _CocoAnnotation},
}  # fmt: skip
"""What COCO, LVIS, CVAT, COCO Annotator, detectron2 and converters write that changes what an entry means."""


@pytest.mark.parametrize("part", WRITTEN_KEYS)
def test_each_key_that_changes_an_entry_is_read_or_accounted_for(part: str) -> None:
    ((keys, model),) = WRITTEN_KEYS[part].items()
    assert set(keys.split()) <= model.model_fields.keys() | UNREAD_KEYS[part].keys()


@pytest.mark.parametrize("mode", [1, "XYWH_ABS"])
def test_read_coco_takes_the_usual_mode_of_boxes(tmp_path: Path, mode: Any) -> None:
    def change(document: dict[str, Any]) -> None:
        for one in document["annotations"]:
            one["bbox_mode"] = mode

    assert read_changed(tmp_path, change) == (CARS, [])


@pytest.mark.parametrize(("part", "key"), [(part, key) for part, keys in UNREAD_KEYS.items() for key in keys])
def test_read_coco_accounts_for_each_key_of_known_meaning(tmp_path: Path, part: str, key: str) -> None:
    first, _, second = key.partition(".")
    value = GIVEN_KEYS.get(key, 0.5)

    def give(document: Document) -> None:
        for place, entry in enumerate(document[part]):
            other = "test" if key in ("split", "subset") and place else value
            entry[first] = {second: other} if second else other

    if key in REFUSED_KEYS:
        with pytest.raises(InputError, match=rf"{part}.{key}: .* have `{key}`"):
            read_changed(tmp_path, give)
    else:
        labels, notes = read_changed(tmp_path, give)
        assert labels == CARS and [f"have `{key}`: " in note for note in notes] == [True]


def test_read_coco_says_nothing_of_keys_that_hold_nothing(tmp_path: Path) -> None:
    def give(document: Document) -> None:
        for entry in document["annotations"]:
            entry |= {"ignore": 0, "score": None, "attributes": {"rotation": 0.0, "occluded": True}, "area": 9}
        for entry in document["images"]:
            entry |= {"neg_category_ids": [], "split": "train", "license": 1, "date_captured": ""}

    assert read_changed(tmp_path, give) == (CARS, [])
