"""The `gti` workload: four views of a car ahead, vehicle or road, from 64x64 crops.

Neighbouring crops of a list are near-duplicates, so each list is cut into 8 contiguous segments and each
segment split 60/20/20 in time. The list of non-vehicles is dealt to the four views in contiguous parts, so no
two queries see the same road. A segment of a view is a clip: its vehicles pass, then the road is empty, at 5
crops a second.
"""

from __future__ import annotations

import tarfile
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from benchmarks.data import splits
from benchmarks.data.files import PrepareError, copy_all, extract, need, once, say

VIEWS = {"far": "GTI_Far", "left": "GTI_Left", "middle": "GTI_MiddleClose", "right": "GTI_Right"}
CLASSES = ("vehicle", "non-vehicle")  # in the order in which they pass the camera
STEP_MS = 200
SEGMENTS = 8


def lists_in(names: list[str]) -> dict[str, list[str]]:
    """Image names of a tar by their folder (`GTI_Far`, ..., `GTI` = non-vehicles), in order of time."""
    lists: dict[str, list[str]] = {}
    for name in names:
        if name.endswith(".png"):
            lists.setdefault(PurePosixPath(name).parent.name, []).append(name)
    return {folder: sorted(members, key=splits.number_in) for folder, members in lists.items()}


def plan(lists: dict[str, list[str]]) -> dict[str, dict[str, str]]:
    """For each view: {path below its data folder, `test/vehicle/far-s3__000200.png`: name in the tar}."""
    for folder in [*VIEWS.values(), "GTI"]:
        if not lists.get(folder):
            raise PrepareError(f"the GTI pack holds no images of {folder}; fetch the data again")
    roads = splits.contiguous(lists["GTI"], [len(lists[folder]) for folder in VIEWS.values()])
    return {
        view: _plan_view(view, lists[folder], road) for (view, folder), road in zip(VIEWS.items(), roads, strict=True)
    }


def _plan_view(view: str, vehicles: list[str], road: list[str]) -> dict[str, str]:
    planned = {}
    segments = zip(splits.in_segments(vehicles, SEGMENTS), splits.in_segments(road, SEGMENTS), strict=True)
    for number, segment in enumerate(segments):
        for split in splits.SPLITS:
            crops = [(label, name) for label, part in zip(CLASSES, segment) for name in part[split]]
            for place, (label, name) in enumerate(crops):
                planned[f"{split}/{label}/{view}-s{number}__{place * STEP_MS:06d}.png"] = name
    return planned


def prepare(data: Path, out: Path) -> dict[str, Any]:
    """Write the four views' crops and the clips that the box plays; returns the counts of each query."""
    pack = need(data / "datasets" / "gti_vehicles_pack.tar")
    say(f"reading {pack.name}")
    with tarfile.open(pack) as tar:
        planned = plan(lists_in(tar.getnames()))
        counts = {}
        for view in VIEWS:
            query = f"{view}-vehicle"
            counts[query] = once(out / "data" / query, partial(extract, tar, planned[view]))
            seen = [path for path in planned[view] if path.startswith("test/")]
            copy_all(out / "data" / query, seen, out / "clips" / view)  # what the box plays
    return counts
