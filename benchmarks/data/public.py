"""Three workloads of classifiers on five labelled sets that their authors keep in public repositories.

Clone the repositories of `REPOSITORIES` into DATA/public, each under its own name.

`shop`: coins, clothing and hand signs as a resnet18, a resnet34 and a mobilenet_v2.
`kiosk`: coins, cards and hand signs as mobilenet_v2 of one ImageNet network, and masks as one of no such network.
`door`: masks, cards and hand signs as a resnet34 and two resnet18.

Images of one photograph, pupil or person (with a mask or without) are one unit, in one split. Clothing has one unit an
image. Masks leave out the copies and the augmented images that the set has beside its photographs.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import cv2

from benchmarks.data import splits
from benchmarks.data.domains import CLIP, image_name
from benchmarks.data.files import PrepareError, copy_all, copy_whole, need, once, say, write_image
from benchmarks.data.simple import INIT

REPOSITORIES = {
    "cards": "EdjeElectronics/TensorFlow-Object-Detection-API-Tutorial-Train-Multiple-Objects-Windows-10",
    "clothing": "alexeygrigorev/clothing-dataset-small",
    "coins": "kaa/coins-dataset",
    "digits": "ardamavi/Sign-Language-Digits-Dataset",
    "masks": "chandrikadeb7/Face-Mask-Detection",
}
PERSONS_DIGITS = 10  # pictures that one pupil gave, one after the other
Images = dict[str, list[tuple[str, str, Path]]]
"""Split -> label, unit and file of each image."""


def prepare_shop(data: Path, out: Path) -> dict[str, Any]:
    """Write the images of `shop` and what its mobilenet_v2 starts from; returns the counts."""
    _copy_init(data, out)
    return _prepare(data, out, ("coins", "clothing", "digits"))


def prepare_kiosk(data: Path, out: Path) -> dict[str, Any]:
    """Write the images of `kiosk` and what its networks start from; returns the counts."""
    _copy_init(data, out)
    return _prepare(data, out, ("coins", "cards", "digits", "masks"))


def prepare_door(data: Path, out: Path) -> dict[str, Any]:
    """Write the images of `door`; returns the counts."""
    return _prepare(data, out, ("masks", "cards", "digits"))


def _copy_init(data: Path, out: Path) -> None:
    copy_whole(need(data / "models" / INIT), out / "init" / "mobilenet_v2.pth")


def _prepare(data: Path, out: Path, tasks: Iterable[str]) -> dict[str, Any]:
    counts = {}
    for name in tasks:
        source = data / "public" / REPOSITORIES[name].split("/")[1]
        if not source.is_dir():
            raise PrepareError(f"{source}: missing; clone github.com/{REPOSITORIES[name]} there")
        say(f"reading {source.name}")
        counts[name] = once(out / "data" / name, partial(READERS[name], source, name))
        tested = sorted((out / "data" / name / "test").rglob("*.jpg"), key=lambda path: path.name)
        copy_all(out, (str(path.relative_to(out)) for path in splits.thin(tested, CLIP)), out / "clips" / name)
    return counts


def read_coins(source: Path, name: str, folder: Path) -> dict[str, Any]:
    """Cut-outs of photographs of many coins; every fifth photograph of train becomes val."""
    found: Images = {split: [] for split in splits.SPLITS}
    for path in sorted(need(source / "classified").rglob("*.jpg")):
        part, photograph = path.parts[-3], path.stem.rsplit("_", 1)[0]
        split = "val" if part == "train" and splits.number_in(photograph) % 5 == 0 else part
        found[split].append((path.parent.name, photograph, path))
    return _write(found, name, folder)


def read_clothing(source: Path, name: str, folder: Path) -> dict[str, Any]:
    """Photographs of one garment each, with the splits that they come with."""
    parts = {"train": "train", "val": "validation", "test": "test"}
    files = {split: sorted(need(source / part).rglob("*.jpg")) for split, part in parts.items()}
    return _write({split: [(p.parent.name, p.stem, p) for p in own] for split, own in files.items()}, name, folder)


def read_digits(source: Path, name: str, folder: Path) -> dict[str, Any]:
    """Hands that show a digit, pupil after pupil; cut by the camera's picture numbers."""
    images = sorted(need(source / "Dataset").rglob("*.JPG"), key=lambda path: splits.number_in(path.stem))
    units = [images[start : start + PERSONS_DIGITS] for start in range(0, len(images), PERSONS_DIGITS)]
    dealt = splits.in_time(units, gap=1)
    found = {
        split: [(path.parent.name, own[0].stem, path) for own in part for path in own] for split, part in dealt.items()
    }
    return _write(found, name, folder)


def read_masks(source: Path, name: str, folder: Path) -> dict[str, Any]:
    """Faces with and without a mask; the pictures of one person with a mask, or without, are in one split."""
    found: Images = {split: [] for split in splits.SPLITS}
    for label in ("with_mask", "without_mask"):
        persons: dict[str, list[Path]] = defaultdict(list)
        for path in sorted(need(source / "dataset" / label).glob("*.jpg")):
            if "copy" not in path.name and "augmented" not in path.name:
                named = re.match(r"\d_\d_(\w*?)_\d+$", path.stem)
                persons[named[1] if named and named[1] else path.stem].append(path)
        for number, (person, own) in enumerate(sorted(persons.items())):
            split = splits.SPLITS[(0, 0, 0, 1, 2)[number % 5]]
            found[split] += [(label, f"{label}-{person}", path) for path in own]
    return _write(found, name, folder)


def read_cards(source: Path, name: str, folder: Path) -> dict[str, Any]:
    """Playing cards cut out of photographs by their boxes, with a margin; every fourth photograph of train is val."""
    counts: dict[str, dict[str, int]] = {split: defaultdict(int) for split in splits.SPLITS}
    for unit, path in enumerate(sorted(need(source / "images").rglob("*.xml"))):
        split = "test" if path.parent.name == "test" else "val" if unit % 4 == 0 else "train"
        photograph = next(path.parent.glob(f"{path.stem}.[jJ][pP][gG]"))
        if (image := cv2.imread(str(photograph))) is None:  # upright, as its boxes lie
            raise PrepareError(f"{photograph}: does not decode; clone the repository again")
        for number, entry in enumerate(ElementTree.parse(path).getroot().iter("object")):
            sides = [float(entry.findtext(f"bndbox/{side}", "0")) for side in ("xmin", "ymin", "xmax", "ymax")]
            x0, y0, x1, y1 = splits.with_margin((sides[0], sides[1], sides[2], sides[3]), 0.1, *image.shape[1::-1])
            label = entry.findtext("name", "")
            write_image(folder / split / label / image_name(name, unit, number), image[y0:y1, x0:x1])
            counts[split][label] += 1
    return {split: dict(own) for split, own in counts.items()}


def _write(images: Images, name: str, folder: Path) -> dict[str, Any]:
    """Copy images, each once, as SPLIT/CLASS/NAME-uUNIT__TIME.jpg; returns how many each split has of each class."""
    units = {
        unit: number for number, unit in enumerate(sorted({unit for own in images.values() for _, unit, _ in own}))
    }
    written = Counter[str]()
    counts: dict[str, dict[str, int]] = {split: defaultdict(int) for split in splits.SPLITS}
    seen = set[bytes]()
    for split, own in images.items():
        for label, unit, path in own:
            if (content := path.read_bytes()) in seen:
                continue
            seen.add(content)
            copy_whole(path, folder / split / label / image_name(name, units[unit], written[unit]))
            written[unit] += 1
            counts[split][label] += 1
    return {split: dict(own) for split, own in counts.items()}


READERS: dict[str, Callable[[Path, str, Path], dict[str, Any]]] = {
    "cards": read_cards,
    "clothing": read_clothing,
    "coins": read_coins,
    "digits": read_digits,
    "masks": read_masks,
}
