"""The `questions` workload: four questions about the pictures that one camera shows, from CIFAR-10's ten classes.

Each query is trained from one published CIFAR-10 network, with pictures of its own, as many with one answer as with the
other. The published network has learnt from CIFAR-10's train part: val and test are pictures of its test part, none in
both. The camera plays pictures of all classes in turn.
"""

from __future__ import annotations

import tarfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.data.cifar import clip_paths, lists_in
from benchmarks.data.files import copy_all, copy_whole, extract, need, once, say

QUESTIONS = {
    "flies": (("flying", "grounded"), ("airplane", "bird")),
    "machine": (("machine", "animal"), ("airplane", "automobile", "ship", "truck")),
    "road": (("road", "elsewhere"), ("automobile", "truck")),
    "water": (("water", "dry"), ("frog", "ship")),
}
"""Query -> its answers, and the classes of CIFAR-10 for which the first one is right."""
FRAMES = {"train": 3000, "val": 1200, "test": 800}
CAMERA = "square"
INIT = "cifar_resnet20-12fca82f.th"


def plan(lists: Mapping[str, list[str]]) -> dict[str, dict[str, str]]:
    """For each query: {path below its data folder, `test/water/square-c0__000600.jpg`: name in the tar}."""
    planned: dict[str, dict[str, str]] = {}
    names = sorted(folder.removeprefix("train/") for folder in lists if folder.startswith("train/"))
    for query, (answers, right) in QUESTIONS.items():
        wrong = [name for name in names if name not in right]
        dealt: dict[str, dict[str, list[str]]] = {split: {} for split in FRAMES}
        for answer, classes in zip(answers, (right, wrong), strict=True):
            starts = {part: dict.fromkeys(classes, 0) for part in ("train", "test")}
            for split, count in FRAMES.items():
                each, part = count // 2 // len(classes), "train" if split == "train" else "test"
                first = starts[part]
                own = [lists[f"{part}/{name}"][first[name] : first[name] + each] for name in classes]
                first.update((name, first[name] + each) for name in classes)
                dealt[split][answer] = [image for turn in zip(*own, strict=True) for image in turn]
        planned[query] = clip_paths(CAMERA, dealt)
    return planned


def prepare(data: Path, out: Path) -> dict[str, Any]:
    """Write the queries' pictures, the camera's clip and the first weights; returns the counts of each query."""
    pack = need(data / "datasets" / "cifar10_jpeg_pack.tar")
    say(f"reading {pack.name}")
    copy_whole(need(data / "models" / INIT), out / "init" / "cifar_resnet20.pth")
    counts = {}
    with tarfile.open(pack) as tar:
        planned = plan(lists_in(tar.getnames()))
        for query, own in planned.items():
            counts[query] = once(out / "data" / query, partial(extract, tar, own))
        first = [path for path in planned["machine"] if path.startswith("test/") and "-c0__" in path]
        copy_all(out / "data" / "machine", first, out / "clips" / CAMERA)
    return counts
