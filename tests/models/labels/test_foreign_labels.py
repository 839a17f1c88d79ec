"""Labels in formats that are not read are refused by name; COCO of other names is read; pictures alone are footage."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from gemel.models.data import load_split
from gemel.models.errors import InputError
from gemel.models.labels.foreign_labels import FORMATS
from gemel.models.notes import collect_notes
from gemel.models.predictions import BoxLabels
from tests.models.queries import make_query

RNG = np.random.default_rng(3)
CAR = BoxLabels(("car",), ((4.0, 5.0, 14.0, 16.0),))


def write_pictures(folder: Path, count: int = 10, name: str = "cam__{:04}.jpg") -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / name.format(index) for index in range(count)]
    for path in paths:
        Image.fromarray(RNG.integers(0, 256, (24, 32, 3), np.uint8)).save(path)
    return paths


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def coco(pictures: Sequence[Path]) -> dict[str, Any]:
    return {
        "images": [{"id": index, "file_name": path.name} for index, path in enumerate(pictures)],
        "categories": [{"id": 1, "name": "car"}],
        "annotations": [
            {"image_id": index, "category_id": 1, "bbox": [4, 5, 10, 11]} for index in range(len(pictures))
        ],
    }


def cvat(data: Path) -> None:
    images = "".join(f"<image name='{path.name}'></image>" for path in write_pictures(data / "images"))
    write(data / "annotations.xml", f"<annotations><version>1.1</version>{images}</annotations>")


def voc(data: Path) -> None:
    for path in write_pictures(data / "JPEGImages"):
        write(data / f"Annotations/{path.stem}.xml", f"<annotation><filename>{path.name}</filename></annotation>")


def voc_in_splits(data: Path) -> None:
    for split in ("train", "valid", "test"):
        for path in write_pictures(data / split):
            write(path.with_suffix(".xml"), "<annotation><object><name>car</name></object></annotation>")


def labelme(data: Path) -> None:
    for path in write_pictures(data):
        write(path.with_suffix(".json"), {"shapes": [{"label": "car"}], "imagePath": path.name})


def kitti(data: Path) -> None:
    for path in write_pictures(data / "image_2"):
        write(data / f"label_2/{path.stem}.txt", "Car 0 0 -1.57 10 10 30 30 1.5 1.6 3.7 1 1.7 20 -1.5\n")


def mot(data: Path) -> None:
    write_pictures(data / "img1", name="{:06}.jpg")
    write(data / "gt/gt.txt", "".join(f"{frame},1,10,10,20,20,1,1,1.0\n" for frame in range(1, 11)))


def metadata(data: Path) -> None:
    write(data / "metadata.jsonl", "\n".join(json.dumps({"file_name": one.name}) for one in write_pictures(data)))


def fiftyone(data: Path) -> None:
    samples = [{"filepath": f"data/{path.name}", "ground_truth": {}} for path in write_pictures(data / "data")]
    write(data / "samples.json", {"samples": samples})


def label_studio(data: Path) -> None:
    tasks = [{"data": {"image": one.name}, "annotations": [{"result": [{"from_name": "label"}]}]}
             for one in write_pictures(data / "images")]  # fmt: skip
    write(data / "project-1.json", tasks)


def unknown(data: Path) -> None:
    write(data / "answers.txt", "\n".join(f"{path.name} => car (1 2)" for path in write_pictures(data)))


def table(data: Path) -> None:
    rows = [f"{path.name},1,1,9,9" for path in write_pictures(data)]
    write(data / "boxes.csv", "\n".join(["picture,x,y,w,h", *rows]))


def faces(data: Path) -> None:
    write(
        data / "wider_bbx_gt.txt", "\n".join(f"{one.name}\n1\n4 5 10 11 0 0" for one in write_pictures(data / "images"))
    )


def supervisely(data: Path) -> None:
    for path in write_pictures(data / "set/img"):
        write(data / f"set/ann/{path.name}.json", {"size": {}, "objects": [{"classTitle": "car"}]})


def visdrone(data: Path) -> None:
    for path in write_pictures(data / "images"):
        write(data / f"annotations/{path.stem}.txt", "4,5,10,11,1,4,0,0\n")


def yaml(data: Path) -> None:
    write(data / "objects.yaml", "\n".join(f"{path.name}: [car, 4, 5]" for path in write_pictures(data)))


def arrays(data: Path) -> None:
    for path in write_pictures(data / "images"):
        write(data / f"labels/{path.stem}.npy", "x")


def archive(data: Path) -> None:
    write_pictures(data)
    write(data / "annotations.zip", "x")


def records(data: Path) -> None:
    write_pictures(data)
    write(data / "all.tfrecord", "x")


FOREIGN: dict[Any, str] = {
    cvat: "CVAT's XML", voc: "Pascal VOC", kitti: "KITTI", mot: "MOT", metadata: "metadata.jsonl of Hugging Face",
    fiftyone: "FiftyOne's JSON",
    label_studio: "Label Studio's JSON", unknown: "a .txt file",
    faces: "a .txt file", supervisely: "a .json file", visdrone: "MOT", yaml: "a .yaml file", arrays: "a .npy file",
    archive: "a .zip file", table: "a .csv file", records: "a .tfrecord file",
}  # fmt: skip
IMAGES: dict[Any, str] = {cvat: "images", voc: "JPEGImages", kitti: "image_2", mot: "img1", label_studio: "images"}
"""Where the folder of pictures alone is named, with the labels beside it."""
READ = (cvat, voc, kitti, mot)
"""Those that are read where the folder that holds both is named (test_object_files.py)."""


def load(data: Path, **keys: Any):
    return load_split(make_query(data=data, **{"task": "detection", "classes": ("car",), **keys}), "test")


@pytest.mark.parametrize("form", FOREIGN, ids=lambda form: form.__name__)
def test_foreign_labels_are_refused_by_the_name_of_their_format(tmp_path: Path, form: Callable[[Path], None]) -> None:
    form(tmp_path / "set")
    folders = [] if form in READ else [tmp_path / "set"]
    for data in [*folders, *([tmp_path / "set" / IMAGES[form]] if form in IMAGES else [])]:
        with pytest.raises(InputError, match="labels") as caught:
            load(data)
        assert FOREIGN[form] in str(caught.value) and "`labels: none`" in str(caught.value)


def test_foreign_labels_of_a_video_are_refused(tmp_path: Path) -> None:
    (tmp_path / "yard.mp4").write_bytes(b"")
    write(tmp_path / "annotations.xml", "<annotations><meta><source>yard.mp4</source></meta></annotations>")
    with pytest.raises(InputError, match="CVAT's XML"):
        load(tmp_path / "yard.mp4")


def test_labels_none_takes_the_pictures_as_footage(tmp_path: Path) -> None:
    voc(tmp_path)
    split = load(tmp_path / "JPEGImages", labels="none")
    assert split.labels is None and len(split) == 2
    voc_in_splits(tmp_path / "split")
    assert len(load(tmp_path / "split", labels="none")) == 10


@pytest.mark.parametrize("task", ["classification", "segmentation", "keypoints", "embedding"])
def test_foreign_labels_are_refused_for_other_tasks(tmp_path: Path, task: str) -> None:
    labelme(tmp_path)
    with pytest.raises(InputError, match="labelme's JSON"):
        load(tmp_path, task=task, classes=("car", "bus"))


@pytest.mark.parametrize("place", ["{}/SegmentationClass/{}.png", "{}/frames/{}_mask.png"])
def test_masks_in_other_places_are_refused(tmp_path: Path, place: str) -> None:
    for path in write_pictures(tmp_path / "frames"):
        mask = Path(place.format(tmp_path, path.stem))
        mask.parent.mkdir(exist_ok=True)
        Image.new("L", (32, 24)).save(mask)
    with pytest.raises(InputError, match=r"labels \(masks\) that are not read .* in masks"):
        load(tmp_path, task="segmentation", classes=("road", "car"))


def test_folders_of_other_names_than_the_classes_are_refused(tmp_path: Path) -> None:
    for name in ("cats", "dogs"):
        write_pictures(tmp_path / name)
    with pytest.raises(InputError, match=r"its folders \(cats, dogs\) are no classes of query gate.*`labels: none`"):
        load(tmp_path, task="classification", classes=("cat", "dog"))


def test_files_that_say_nothing_of_the_pictures_leave_them_unlabelled(tmp_path: Path) -> None:
    pictures = write_pictures(tmp_path / "frames")
    write(tmp_path / "frames/README.txt", "Ten frames, recorded on Monday.")
    write(tmp_path / "frames/list.txt", "\n".join(path.name for path in pictures))
    write(tmp_path / "frames/settings.json", {"fps": 5})
    write(tmp_path / "other.json", {"annotations": []})
    assert load(tmp_path / "frames").labels is None


def by_split(data: Path) -> None:
    for split in ("train", "val", "test"):
        write(data / f"{split}.json", coco(write_pictures(data / "images", name=split + "{}.jpg")))


def cvat_coco(data: Path) -> None:
    for split in ("Train", "Validation", "Test"):
        pictures = write_pictures(data / "images" / split, name=split + "{}.jpg")
        write(data / f"annotations/instances_{split}.json", coco(pictures))
        write(data / f"annotations/captions_{split}.json", coco(pictures))


def fiftyone_coco(data: Path) -> None:
    for split in ("train", "validation", "test"):
        write(data / split / "labels.json", coco(write_pictures(data / split / "data")))


@pytest.mark.parametrize("form", [by_split, cvat_coco, fiftyone_coco], ids=lambda form: form.__name__)
def test_coco_under_other_names_is_read(tmp_path: Path, form: Callable[[Path], None]) -> None:
    form(tmp_path)
    with collect_notes() as notes:
        assert load(tmp_path).labels == (CAR,) * 10
    assert notes == []


def test_several_files_of_coco_without_a_split_are_refused(tmp_path: Path) -> None:
    for name in ("yard", "gate"):
        write(tmp_path / f"{name}.json", coco(write_pictures(tmp_path / "images")))
    with pytest.raises(InputError, match=r"several files of annotations: gate.json, yard.json; keep one"):
        load(tmp_path)


def test_formats_have_unique_names() -> None:
    assert len({name for name, _ in FORMATS}) == len(FORMATS)
