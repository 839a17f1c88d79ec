"""Pascal VOC, labelme, KITTI, CVAT and MOT are read as their programs write them; damaged files are named."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from gemel.models.errors import InputError
from gemel.models.labels.foreign_labels import list_label_files, name_format
from gemel.models.labels.object_files import READERS
from gemel.models.notes import collect_notes
from gemel.models.predictions import Box, BoxLabels
from tests.hostile.mutations import damage_bytes
from tests.models.labels.test_foreign_labels import CAR, load, write, write_pictures

VOC = (
    "<annotation><filename>{name}</filename><size><width>32</width><height>24</height></size>"
    "<object><name>car</name><difficult>0</difficult>"
    "<bndbox><xmin>4</xmin><ymin>5</ymin><xmax>14</xmax><ymax>16</ymax></bndbox></object></annotation>"
)
KITTI_CAR = "car 0.00 0 -1.57 4.00 5.00 14.00 16.00 1.5 1.6 3.7 1 1.7 20 -1.5\n"


def voc(data: Path) -> None:
    for path in write_pictures(data / "JPEGImages"):
        write(data / f"Annotations/{path.stem}.xml", VOC.format(name=path.name))


def voc_in_splits(data: Path) -> None:
    for split in ("train", "valid", "test"):
        for path in write_pictures(data / split):
            write(path.with_suffix(".xml"), VOC.format(name=path.name))


def labelme(data: Path) -> None:
    for path in write_pictures(data):
        shape = {"label": "car", "points": [[4, 5], [14, 16]], "shape_type": "rectangle"}
        point = {"label": "car", "points": [[1, 1]], "shape_type": "point"}
        shapes = [shape, point] if path.stem.endswith("9") else [shape]
        keys = {"version": "5.5.0", "imagePath": path.name, "imageData": None, "imageWidth": 32, "imageHeight": 24}
        write(path.with_suffix(".json"), {**keys, "shapes": shapes})


def kitti(data: Path) -> None:
    for path in write_pictures(data / "image_2"):
        write(data / f"label_2/{path.stem}.txt", KITTI_CAR)


def cvat(data: Path) -> None:
    images = ""
    for number, path in enumerate(write_pictures(data / "images")):
        shape = "<box label='car' xtl='4' ytl='5' xbr='14' ybr='16'/>"
        if number % 2:
            shape = "<polygon label='car' points='4,5;14,5;14,16;4,16'/>"
        images += f"<image id='{number}' name='{path.name}' width='32' height='24'>{shape}</image>"
    write(data / "annotations.xml", f"<annotations><version>1.1</version>{images}</annotations>")


def mot(data: Path) -> None:
    write_pictures(data / "img1", name="{:06}.jpg")
    write(data / "gt/gt.txt", "".join(f"{frame},1,4,5,10,11,1,3,1.0\n" for frame in range(10)))


@pytest.mark.parametrize("form", [voc, labelme, kitti, cvat, mot], ids=lambda form: form.__name__)
def test_labels_of_other_programs_are_read_and_cut_in_order(tmp_path: Path, form: Callable[[Path], None]) -> None:
    form(tmp_path)
    split = load(tmp_path)
    assert split.labels == (CAR,) * 2 and len(split) == 2, "a fifth is test"


def test_voc_in_folders_of_splits_is_read(tmp_path: Path) -> None:
    voc_in_splits(tmp_path)
    assert load(tmp_path).labels == (CAR,) * 10


def test_difficult_objects_and_regions_are_not_counted(tmp_path: Path) -> None:
    kitti(tmp_path)
    for path in (tmp_path / "label_2").iterdir():
        path.write_text(f"{KITTI_CAR}DontCare -1 -1 -10 20.0 1.0 30.0 9.0 -1 -1 -1 -1000 -1000 -1000 -10\n")
    region = BoxLabels(("car",), ((20.0, 1.0, 30.0, 9.0),))
    assert load(tmp_path).labels == (BoxLabels(CAR.classes, CAR.boxes, region),) * 2


def test_sizes_of_pictures_that_were_made_smaller_scale_the_boxes(tmp_path: Path) -> None:
    voc(tmp_path)
    for path in (tmp_path / "Annotations").iterdir():
        text = path.read_text().replace(">32<", ">64<").replace(">24<", ">48<")
        for side in (4, 5, 14, 16):
            text = text.replace(f">{side}<", f">{2 * side}<")
        path.write_text(text)
    assert load(tmp_path).labels == (CAR,) * 2


def test_an_empty_file_is_a_picture_without_objects(tmp_path: Path) -> None:
    kitti(tmp_path)
    (tmp_path / "label_2/cam__0009.txt").write_text("")
    assert load(tmp_path).labels == (CAR, BoxLabels((), ()))


def test_points_and_lines_of_labelme_are_left_out_with_a_note(tmp_path: Path) -> None:
    labelme(tmp_path)
    with collect_notes() as notes:
        load(tmp_path)
    assert any("1 objects are or have `point`: these are no objects" in note for note in notes)


def list_pictures(data: Path) -> None:
    voc(data)
    pictures = sorted(path.stem for path in (data / "JPEGImages").iterdir())
    for split, stems in (("train", pictures[3:]), ("val", pictures[:1]), ("test", pictures[1:3])):
        write(data / f"ImageSets/Main/{split}.txt", "\n".join(stems))


def in_folders(data: Path) -> None:
    for split in ("train", "val", "test"):
        for path in write_pictures(data / "images" / split, count=2, name=split + "{}.jpg"):
            write(data / f"annotations/{split}/{path.stem}.xml", VOC.format(name=path.name))


@pytest.mark.parametrize("form", [list_pictures, in_folders], ids=lambda form: form.__name__)
def test_splits_that_lists_or_folders_name_are_followed(tmp_path: Path, form: Callable[[Path], None]) -> None:
    form(tmp_path)
    with collect_notes() as notes:
        assert load(tmp_path).labels == (CAR,) * 2
    assert notes == []


def test_lists_without_a_split_are_noted(tmp_path: Path) -> None:
    list_pictures(tmp_path)
    (tmp_path / "ImageSets/Main/test.txt").unlink()
    with collect_notes() as notes:
        load(tmp_path)
    assert any("its ImageSets list no test, and are not followed" in note for note in notes)


@pytest.mark.parametrize(("shape", "box"), [
    ("<ellipse label='car' cx='9' cy='10.5' rx='5' ry='5.5'/>", CAR.boxes[0]),
    ("<mask label='car' rle='0, 110' left='4' top='5' width='10' height='11'/>", CAR.boxes[0]),
    ("<box label='car' xtl='4' ytl='5' xbr='14' ybr='16' rotation='90'/>", (3.5, 5.5, 14.5, 15.5)),
])  # fmt: skip
def test_every_shape_of_cvat_with_an_area_is_a_box_around_it(tmp_path: Path, shape: str, box: Box) -> None:
    images = "".join(f"<image name='{path.name}'>{shape}</image>" for path in write_pictures(tmp_path / "images"))
    write(tmp_path / "annotations.xml", f"<annotations><version>1.1</version>{images}</annotations>")
    labels = load(tmp_path).labels
    assert labels is not None and isinstance(labels[0], BoxLabels)
    assert labels[0].boxes[0] == pytest.approx(box)


def test_pictures_of_one_name_in_two_folders_of_cvat_have_their_own_labels(tmp_path: Path) -> None:
    images = ""
    for folder, name in (("a", "car"), ("b", "bus")):
        for path in write_pictures(tmp_path / f"images/{folder}", name="{}.jpg"):
            shape = f"<box label='{name}' xtl='4' ytl='5' xbr='14' ybr='16'/>"
            images += f"<image name='{folder}/{path.name}'>{shape}</image>"
    write(tmp_path / "annotations.xml", f"<annotations><version>1.1</version>{images}</annotations>")
    assert load(tmp_path, classes=("car", "bus")).labels == (BoxLabels(("bus",), CAR.boxes),) * 4


# What is not used

PLAIN = "say nothing of classes, boxes or what counts"
HARMLESS: dict[str, tuple[str, ...]] = {
    "voc": ("pose", "truncated", "occluded", "part", "polygon", "actions", "attributes", "track_id"),
    "labelme": ("text", "flags", "description", "mask", "direction", "attributes", "kie_linking", "group", "cells"),
    "cvat": (), "kitti": (), "mot": (),
}  # fmt: skip
"""Keys that the programs write and that PLAIN."""
FULL_VOC = (
    "<annotation><folder>a</folder><segmented>0</segmented><object><name>car</name><pose>Left</pose>"
    "<truncated>1</truncated><occluded>1</occluded><difficult>0</difficult><confidence>0.7</confidence><zz>1</zz>"
    "<score>0.7</score><polygon>1</polygon><track_id>1</track_id><actions>1</actions><part>1</part>"
    "<attributes>1<attribute><name>rotation</name><value>30.0</value></attribute></attributes>"
    "<bndbox><xmin>4</xmin><ymin>5</ymin><xmax>14</xmax><ymax>16</ymax></bndbox></object></annotation>"
)
FULL_SHAPE = {
    "label": "car", "points": [[4, 5], [14, 16]], "shape_type": "rectangle", "difficult": False, "score": 0.7,
    "group_id": 4, "text": "a", "flags": {"a": True}, "description": "a", "mask": "a", "direction": 1.5, "zz": 1,
    "attributes": {"a": 1}, "kie_linking": [1], "group": 3, "cells": [1],
}  # fmt: skip


def full_voc(data: Path) -> None:
    for path in write_pictures(data):
        write(path.with_suffix(".xml"), FULL_VOC)


def full_labelme(data: Path) -> None:
    shapes = [FULL_SHAPE, *({**FULL_SHAPE, "shape_type": kind} for kind in ("point", "line", "linestrip"))]
    for path in write_pictures(data):
        write(path.with_suffix(".json"), {"shapes": shapes})


def full_cvat(data: Path) -> None:
    box = "<box label='car' xtl='4' ytl='5' xbr='14' ybr='16'/>"
    bare = "".join(f"<{tag} label='car'/>" for tag in ("points", "polyline", "skeleton", "cuboid", "tag", "zz"))
    images = "".join(
        f"<image name='{one.name}' subset='a'>{box}{bare}</image>" for one in write_pictures(data / "images")
    )
    write(data / "annotations.xml", f"<annotations><version>1.1</version>{images}</annotations>")


def full_kitti(data: Path) -> None:
    for path in write_pictures(data / "image_2"):
        write(data / f"label_2/{path.stem}.txt", KITTI_CAR.replace("\n", " 0.7\n"))


@pytest.mark.parametrize(("form", "known"), [
    (full_voc, {"confidence", "score", "rotation"}),
    (full_labelme, {"score", "group_id", "point", "line", "linestrip"}),
    (full_cvat, {"points", "polyline", "skeleton", "cuboid", "tag", "subset"}),
    (full_kitti, {"score"}),
], ids=lambda value: getattr(value, "__name__", ""))  # fmt: skip
def test_readers_give_back_what_they_do_not_use_and_what_means_something_is_noted(
    tmp_path: Path, form: Callable[[Path], None], known: set[str]
) -> None:
    form(tmp_path)
    pictures, others = list_label_files(tmp_path)
    form_name = next(name for path in others if (name := name_format(path)) in READERS)
    readings = READERS[form_name](pictures, [path for path in others if name_format(path) == form_name], others)
    unused = {name for reading in readings.values() for name in reading.unused}
    harmless = set(HARMLESS[form.__name__.removeprefix("full_")])
    assert known <= unused and unused - known - harmless <= {"zz"}, f"all others {PLAIN}"
    assert "zz" in unused or form is full_kitti, "a key that nobody knows comes back too"
    with collect_notes() as notes:
        load(tmp_path)
    assert {name for name in unused if any(f"`{name}`" in note for note in notes)} == known


def damage_size(data: Path) -> None:
    voc(data)
    path = data / "Annotations/cam__0003.xml"
    path.write_text(path.read_text().replace(">32<", ">99<"))


def damage_number(data: Path) -> None:
    voc(data)
    path = data / "Annotations/cam__0003.xml"
    path.write_text(path.read_text().replace(">14<", ">wide<"))


def declare_entities(data: Path) -> None:
    voc(data)
    path = data / "Annotations/cam__0003.xml"
    path.write_text(f'<!DOCTYPE annotation [<!ENTITY a "aaaa">]>{path.read_text()}')


def tear(data: Path) -> None:
    voc(data)
    path = data / "Annotations/cam__0003.xml"
    path.write_text(path.read_text()[:-20])


def lose(data: Path) -> None:
    voc(data)
    for number in (3, 4, 5):
        (data / f"Annotations/cam__000{number}.xml").unlink()


def rename(data: Path) -> None:
    voc(data)
    for path in (data / "Annotations").iterdir():
        path.write_text(path.read_text().replace(">car<", ">bus<"))


def track(data: Path) -> None:
    write_pictures(data / "images")
    write(data / "annotations.xml", "<annotations><meta/><track id='0' label='car'></track></annotations>")


def lose_frame(data: Path) -> None:
    mot(data)
    (data / "img1/000003.jpg").unlink()


@pytest.mark.parametrize(("damage", "problem"), [
    (damage_size, r"cam__0003\.xml: states a picture of 99 x 24, and it has 32 x 24"),
    (damage_number, r"cam__0003\.xml: xmax is 'wide', no number"),
    (declare_entities, r"cam__0003\.xml: declares entities"),
    (tear, r"cam__0003\.xml: is no XML"),
    (lose, r"3 of 10 pictures have no labels: cam__0003\.jpg"),
    (rename, r"no object is called 'car' \(query gate\); they are: bus"),
    (track, r"annotations\.xml: data: holds tracks of a video"),
    (lose_frame, r"gt\.txt: data: describes frame 3, whose picture is not there"),
], ids=lambda value: getattr(value, "__name__", ""))  # fmt: skip
def test_damaged_labels_are_refused_by_name(tmp_path: Path, damage: Callable[[Path], None], problem: str) -> None:
    damage(tmp_path)
    with pytest.raises(InputError, match=problem):
        load(tmp_path)


@pytest.mark.parametrize("form", [voc, labelme, kitti, cvat, mot], ids=lambda form: form.__name__)
def test_files_that_are_damaged_at_random_are_refused_or_read(tmp_path: Path, form: Callable[[Path], None]) -> None:
    form(tmp_path)
    path = sorted(path for path in tmp_path.rglob("*") if path.suffix in (".xml", ".json", ".txt"))[0]
    whole = path.read_bytes()
    for seed in range(40):
        path.write_bytes(damage_bytes(whole, Random(seed)))
        with contextlib.suppress(InputError):
            load(tmp_path)
