"""Where the real footage lies, and how prepared data is written: whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np

Box = tuple[float, float, float, float]
RULES = 1  # counted up when a rule changes, so that data prepared by older rules is made anew
JPEG_QUALITY = 95
STAMP = "prepared.json"
DATA_LICENCES = (
    "TfL footage: Powered by TfL Open Data. GTI Vehicle Image Database: research use, with citation. "
    "CIFAR-10: no formal licence, used for research; cite Krizhevsky, Learning Multiple Layers of Features, 2009. "
    "BCCD, DeepPCB, GroceryStoreDataset, InfraredSolarModules: MIT. Manaus traffic: CC BY 4.0. "
    "Deep Pavements: MIT, its photographs under Creative Commons licences. "
    "Clothing: CC0. Coins, masks: MIT. Hand signs, cards: Apache-2.0."
)


class PrepareError(Exception):
    """One line for the user: what is missing, and what to do."""


def data_folder(given: str | None, repository: Path) -> Path:
    """The folder of real footage: --data, else GEMEL_DATA, else ../shared/data beside the repository."""
    folder = Path(given or os.environ.get("GEMEL_DATA") or repository.parent / "shared" / "data")
    if not (folder / "MANIFEST.json").is_file():
        raise PrepareError(f"{folder}: no real footage here (no MANIFEST.json); give --data DIR or set GEMEL_DATA")
    return folder


def need(path: Path) -> Path:
    """The path, or PrepareError where the data folder lacks it."""
    if not path.exists():
        raise PrepareError(f"{path}: missing from the data folder; fetch the data again")
    return path


def say(text: str) -> None:
    """A line of progress, on stderr so that --json keeps stdout to itself."""
    print(text, file=sys.stderr, flush=True)


def once(target: Path, make: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Make a folder by `make(partial folder) -> its counts`, unless the same rules made it before.

    The folder gets its name only when it is complete, so an interruption leaves nothing half-made behind.
    """
    stamp = target / STAMP
    if stamp.is_file():
        known = json.loads(stamp.read_text(encoding="utf-8"))
        if known.get("rules") == RULES:
            say(f"  {target.name}: already prepared")
            return known["counts"]
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    counts = make(partial)
    (partial / STAMP).write_text(json.dumps({"rules": RULES, "counts": counts}, indent=1) + "\n", encoding="utf-8")
    if target.exists():
        shutil.rmtree(target)
    partial.rename(target)
    say(f"  {target.name}: {json.dumps(counts)}")
    return counts


def copy_whole(source: Path, target: Path) -> None:
    """Copy a file under its name only when all of it is there."""
    if target.is_file() and target.stat().st_size == source.stat().st_size:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    shutil.copyfile(source, partial)
    partial.replace(target)


def copy_all(source: Path, paths: Iterable[str], target: Path) -> None:
    """Copy these files below `source` into one folder, under their own names."""
    for path in paths:
        copy_whole(source / path, target / Path(path).name)


def extract(tar: tarfile.TarFile, planned: Mapping[str, str], folder: Path) -> dict[str, Any]:
    """Write images of a tar as `{path below the folder, SPLIT/CLASS/NAME: name in the tar}` says.

    Returns how many images each split has of each class; PrepareError where the tar lacks one.
    """
    members = {member.name: member for member in tar.getmembers()}
    counts: dict[str, dict[str, int]] = {}
    for path, name in planned.items():
        member = tar.extractfile(members[name]) if name in members else None
        if member is None:
            raise PrepareError(f"{name}: is not a file in the pack; fetch the data again")
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(member.read())
        split, label, _ = path.split("/")
        labels = counts.setdefault(split, {})
        labels[label] = labels.get(label, 0) + 1
    return counts


def frames_of(clip: Path) -> Iterator[tuple[int, np.ndarray]]:
    """Every frame of a clip as (number, BGR image); PrepareError when it has none."""
    reader = cv2.VideoCapture(str(need(clip)))
    number = 0
    while True:
        got, frame = reader.read()
        if not got:
            break
        yield number, frame
        number += 1
    reader.release()
    if number == 0:
        raise PrepareError(f"{clip}: no frame decodes; fetch the data again")


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON-lines file of boxes."""
    return [json.loads(line) for line in need(path).read_text(encoding="utf-8").splitlines() if line]


def write_image(path: Path, image: np.ndarray) -> None:
    """Write a BGR image; JPEG at quality 95. PrepareError when the disk refuses."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not cv2.imwrite(str(path), image, [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY]):
        raise PrepareError(f"{path}: cannot be written; free some space or give another --out")


class CocoSplit:
    """Collects one split of detection data and writes `images/` and `annotations.json`."""

    def __init__(self, folder: Path, classes: Sequence[str]) -> None:
        self.folder = folder
        self.categories = [{"id": number + 1, "name": name} for number, name in enumerate(classes)]
        self.images: list[dict[str, Any]] = []
        self.annotations: list[dict[str, Any]] = []

    def add(self, stem: str, image: np.ndarray, boxes: Sequence[Box]) -> None:
        """One frame and its boxes (x0, y0, x1, y1), all of the first class, cut off at the frame's edge."""
        height, width = image.shape[:2]
        write_image(self.folder / "images" / f"{stem}.jpg", image)
        self.images.append({"id": len(self.images) + 1, "file_name": f"{stem}.jpg", "width": width, "height": height})
        for x0, y0, x1, y1 in boxes:
            x0, y0, x1, y1 = max(0.0, x0), max(0.0, y0), min(float(width), x1), min(float(height), y1)
            if x1 - x0 < 1 or y1 - y0 < 1:
                continue
            bbox = [round(value, 2) for value in (x0, y0, x1 - x0, y1 - y0)]
            self.annotations.append(
                {
                    "id": len(self.annotations) + 1,
                    "image_id": len(self.images),
                    "category_id": 1,
                    "bbox": bbox,
                    "area": round(bbox[2] * bbox[3], 2),
                    "iscrowd": 0,
                }
            )

    def close(self) -> dict[str, int]:
        """Write the annotations; returns the counts of frames and boxes."""
        document = {"images": self.images, "annotations": self.annotations, "categories": self.categories}
        (self.folder / "annotations.json").write_text(json.dumps(document), encoding="utf-8")
        return {"frames": len(self.images), "boxes": len(self.annotations)}
