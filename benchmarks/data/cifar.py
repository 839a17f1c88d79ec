"""The `cifar` workload: four queries over four of CIFAR-10's ten classes each, from images of 32x32.

The images are independent of each other and have no time, so each class's list is dealt in contiguous parts to the
queries that ask for it: no image is used by two queries. Train and val come out of the pack's train part, test out of
its test part alone. A split of a query is played as clips of 20 seconds, 5 images a second: something of each class
in turn stands before the camera for a second.
"""

from __future__ import annotations

import tarfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from benchmarks.data import splits
from benchmarks.data.files import PrepareError, copy_all, extract, need, once, say

CLASSES = {
    "harbour-kind": ("airplane", "automobile", "ship", "truck"),
    "meadow-kind": ("cat", "deer", "dog", "horse"),
    "pond-kind": ("automobile", "bird", "deer", "frog"),
    "quay-kind": ("bird", "dog", "frog", "ship"),
}
MOST = {"train": 600, "val": 150, "test": 250}  # of one class, so that a training on two cores takes minutes
STEP_MS = 200
STAY = 5  # images of one class in a row
CLIP = 100  # images


def lists_in(names: list[str]) -> dict[str, list[str]]:
    """Image names of the pack by their folder (`train/ship`, `test/ship`, ...), in the pack's order of numbers."""
    lists: dict[str, list[str]] = {}
    for name in names:
        if name.endswith(".jpg"):
            lists.setdefault(str(PurePosixPath(name).parent), []).append(name)
    return {folder: sorted(members, key=splits.number_in) for folder, members in lists.items()}


def plan(lists: Mapping[str, list[str]]) -> dict[str, dict[str, str]]:
    """For each query: {path below its data folder, `test/ship/quay-c0__000600.jpg`: name in the tar}."""
    dealt: dict[str, dict[str, dict[str, list[str]]]] = {query: {split: {} for split in MOST} for query in CLASSES}
    for label in sorted({label for labels in CLASSES.values() for label in labels}):
        for part in ("train", "test"):
            if not lists.get(f"{part}/{label}"):
                raise PrepareError(f"the CIFAR-10 pack holds no images of {part}/{label}; fetch the data again")
        askers = [query for query, labels in CLASSES.items() if label in labels]
        even = [1.0] * len(askers)
        learnt, tested = (
            splits.contiguous(lists[f"train/{label}"], even),
            splits.contiguous(lists[f"test/{label}"], even),
        )
        for query, own, test in zip(askers, learnt, tested, strict=True):
            train, val = splits.contiguous(own, [MOST["train"], MOST["val"]])
            for split, members in (("train", train), ("val", val), ("test", test)):
                dealt[query][split][label] = members[: MOST[split]]
    return {query: clip_paths(camera_of(query), own) for query, own in dealt.items()}


def camera_of(query: str) -> str:
    """The camera that a query looks through."""
    return query.removesuffix("-kind")


def clip_paths(camera: str, dealt: Mapping[str, Mapping[str, list[str]]]) -> dict[str, str]:
    """{the name that an image of a split and class gets from its place in the camera's clips: its name in the tar}."""
    planned = {}
    for split, by_label in dealt.items():
        for place, (label, name) in enumerate(in_turn(by_label)):
            clip, number = divmod(place, CLIP)
            planned[f"{split}/{label}/{camera}-c{clip}__{number * STEP_MS:06d}.jpg"] = name
    return planned


def in_turn(by_label: Mapping[str, list[str]]) -> list[tuple[str, str]]:
    """(label, image) in the order in which they stand before the camera: `STAY` of each class, then the next."""
    longest = max(len(members) for members in by_label.values())
    return [
        (label, name)
        for start in range(0, longest, STAY)
        for label, members in by_label.items()
        for name in members[start : start + STAY]
    ]


def prepare(data: Path, out: Path) -> dict[str, Any]:
    """Write the four queries' images and the clip that each camera plays; returns the counts of each query."""
    pack = need(data / "datasets" / "cifar10_jpeg_pack.tar")
    say(f"reading {pack.name}")
    counts = {}
    with tarfile.open(pack) as tar:
        for query, planned in plan(lists_in(tar.getnames())).items():
            counts[query] = once(out / "data" / query, partial(extract, tar, planned))
            first = [path for path in planned if path.startswith("test/") and "-c0__" in path]
            copy_all(out / "data" / query, first, out / "clips" / camera_of(query))
    return counts
