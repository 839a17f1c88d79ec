"""The `domains` workload: six tasks of six domains, as others published them, each with the splits it came with.

An archive holds the images, the labels (folders of classes, or annotations.json in COCO form), `splits.json` (images
of train, val and test) and `units.json` (image -> what belongs together: a board, a scene, a shelf). Nothing of one
unit is in two splits; an image is named after its unit, so that intervals are drawn over units. The images have no
time: a camera plays a hundred of a test split, one after the other.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.data import splits
from benchmarks.data.files import PrepareError, copy_all, copy_whole, extract, need, once, say

DETECTION = ("bccd", "deeppcb", "manaus")
CLASSIFICATION = ("grocery", "pavements", "solar_ir")
INIT = "FastestDet_280-epoch.pth"
STEP_MS = 200
CLIP = 100  # images


@dataclass(frozen=True)
class Place:
    """Where an image goes: its split, its unit (a number) and its number within the unit."""

    split: str
    unit: int
    number: int


def plan(where: str, dealt: Any, units: Any) -> dict[str, Place]:
    """Image -> its place; PrepareError where splits and units do not fit together."""
    if not isinstance(units, dict) or not isinstance(dealt, dict):
        raise PrepareError(f"{where}: units.json and splits.json must be mappings; fetch the data again")
    numbers = {unit: number for number, unit in enumerate(sorted({str(unit) for unit in units.values()}))}
    split_of: dict[str, str] = {}
    places: dict[str, Place] = {}
    counted = [0] * len(numbers)
    for split in splits.SPLITS:
        images = dealt.get(split)
        if not isinstance(images, list) or not images:
            raise PrepareError(f"{where}: splits.json has no images of {split}; fetch the data again")
        for image in map(str, images):
            if image not in units:
                raise PrepareError(f"{where}: units.json says nothing of {image}; fetch the data again")
            unit = str(units[image])
            if split_of.setdefault(unit, split) != split:
                raise PrepareError(f"{where}: unit {unit} is in {split_of[unit]} and in {split}; fetch the data again")
            if image in places:
                raise PrepareError(f"{where}: {image} stands twice in splits.json; fetch the data again")
            places[image] = Place(split, numbers[unit], counted[numbers[unit]])
            counted[numbers[unit]] += 1
    return places


def paths(name: str, places: Mapping[str, Place], annotated: bool) -> dict[str, str]:
    """{path below the data folder, `test/grass/pavements-u0007__000200.jpg`: name in the tar}.

    Annotated images lie in one folder, `test/images`; others are named CLASS/NAME. PrepareError for another name.
    """
    planned = {}
    for image, place in places.items():
        label, _, rest = image.rpartition("/")
        if bool(label) == annotated or label in (".", "..") or "/" in label or not rest.endswith(".jpg"):
            form = "NAME.jpg" if annotated else "CLASS/NAME.jpg"
            raise PrepareError(f"{name}.tar: {image} is not {form}; fetch the data again")
        planned[f"{place.split}/{label or 'images'}/{image_name(name, place.unit, place.number)}"] = (
            f"images/{image}" if annotated else image
        )
    return planned


def image_name(name: str, unit: int, number: int) -> str:
    """The file name of an image of a task: its unit, and its place in it as a time."""
    return f"{name}-u{unit:04d}__{number * STEP_MS:06d}.jpg"


def annotations_by_split(where: str, document: Any, planned: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Split -> its part of COCO annotations, the images under their new names; PrepareError for an image without."""
    try:
        known = {f"images/{entry['file_name']}": entry for entry in document["images"]}
        boxes: dict[Any, list[Any]] = {entry["id"]: [] for entry in document["images"]}
        for entry in document["annotations"]:
            boxes[entry["image_id"]].append(entry)
        parts = {split: {"images": [], "annotations": []} for split in splits.SPLITS}
        for path, member in planned.items():
            split, _, file_name = path.split("/")
            parts[split]["images"].append({**known[member], "file_name": file_name})
            parts[split]["annotations"] += boxes[known[member]["id"]]
        return {split: {**part, "categories": document["categories"]} for split, part in parts.items()}
    except (KeyError, TypeError) as error:
        raise PrepareError(f"{where}: annotations.json lacks {error}; fetch the data again") from error


def prepare(data: Path, out: Path) -> dict[str, Any]:
    """Write the images and labels of every task, the clips and what training starts from; returns the counts."""
    copy_whole(need(data / "models" / INIT), out / "init" / "fastestdet.pth")
    return {name: write_task(data, out, name) for name in (*DETECTION, *CLASSIFICATION)}


def write_task(data: Path, out: Path, name: str) -> dict[str, Any]:
    """Write the images, labels and clip of one task; returns the counts."""
    pack = need(data / "domains" / f"{name}.tar")
    say(f"reading {pack.name}")
    with tarfile.open(pack) as tar:
        places = plan(pack.name, _read(tar, pack.name, "splits.json"), _read(tar, pack.name, "units.json"))
        planned = paths(name, places, name in DETECTION)
        counts = once(out / "data" / name, partial(_write, tar, name, planned))
    tested = sorted((path for path in planned if path.startswith("test/")), key=lambda path: Path(path).name)
    copy_all(out / "data" / name, splits.thin(tested, CLIP), out / "clips" / name)
    return counts


def _write(tar: tarfile.TarFile, name: str, planned: Mapping[str, str], folder: Path) -> dict[str, Any]:
    counts = extract(tar, planned, folder)
    if name in DETECTION:
        where = f"{name}.tar"
        for split, part in annotations_by_split(where, _read(tar, where, "annotations.json"), planned).items():
            (folder / split / "annotations.json").write_text(json.dumps(part), encoding="utf-8")
            counts[split]["boxes"] = len(part["annotations"])
    for split, own in counts.items():
        own["units"] = len({Path(path).name.split("__")[0] for path in planned if path.startswith(f"{split}/")})
    return counts


def _read(tar: tarfile.TarFile, where: str, name: str) -> Any:
    """A JSON file of the archive; PrepareError where there is none."""
    try:
        member = tar.extractfile(name)
        assert member is not None
        return json.loads(member.read())
    except (KeyError, AssertionError) as error:
        raise PrepareError(f"{where}: holds no {name}; fetch the data again") from error
    except ValueError as error:
        raise PrepareError(f"{where}: {name} is no JSON ({error}); fetch the data again") from error
