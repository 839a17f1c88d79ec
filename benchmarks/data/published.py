"""The `published` workload: four ResNets for CIFAR-10 as others trained and published them, each asked for all classes.

The models are independent of each other, and none is larger than its task asks for (0.3 to 0.9 million weights). They
were trained on CIFAR-10's train part: val and test are images of its test part, the same for all four, no image in
both. Everything else is as in `cifar`: clips of 20 seconds, something of each class in turn.
"""

from __future__ import annotations

import tarfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.data import splits
from benchmarks.data.cifar import clip_paths, lists_in
from benchmarks.data.files import PrepareError, copy_all, copy_whole, extract, need, once, say

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
MOST = {"train": 1000, "val": 200, "test": 300}  # of one class
WEIGHTS = {
    "north-kind": "cifar_resnet20-12fca82f.th",
    "east-kind": "cifar_resnet32-d509ac18.th",
    "south-kind": "cifar_resnet44-014dd654.th",
    "west-kind": "cifar_resnet56-4bfd9763.th",
}
CAMERA = "square"


def plan(lists: Mapping[str, list[str]]) -> dict[str, str]:
    """{path below the data folder, `test/ship/square-c0__000600.jpg`: name in the tar}."""
    dealt: dict[str, dict[str, list[str]]] = {split: {} for split in MOST}
    for label in CLASSES:
        for part in ("train", "test"):
            if not lists.get(f"{part}/{label}"):
                raise PrepareError(f"the CIFAR-10 pack holds no images of {part}/{label}; fetch the data again")
        dealt["train"][label] = lists[f"train/{label}"][: MOST["train"]]
        unseen = splits.contiguous(lists[f"test/{label}"], [MOST["val"], MOST["test"]])
        for split, members in zip(("val", "test"), unseen, strict=True):
            dealt[split][label] = members[: MOST[split]]
    return clip_paths(CAMERA, dealt)


def prepare(data: Path, out: Path) -> dict[str, Any]:
    """Write the images, the clip that the camera plays and the weights; returns the counts."""
    pack = need(data / "datasets" / "cifar10_jpeg_pack.tar")
    say(f"reading {pack.name}")
    with tarfile.open(pack) as tar:
        planned = plan(lists_in(tar.getnames()))
        counts = once(out / "data" / "kinds", partial(extract, tar, planned))
    first = [path for path in planned if path.startswith("test/") and "-c0__" in path]
    copy_all(out / "data" / "kinds", first, out / "clips" / CAMERA)
    for query, name in WEIGHTS.items():
        copy_whole(need(data / "models" / name), out / "weights" / f"{query}.pth")
    return {"kinds": counts}
