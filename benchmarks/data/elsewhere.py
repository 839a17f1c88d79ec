"""The `elsewhere` workload: three detectors of vehicles, each tested on a camera that it was never trained on.

The London cameras 03601, 03604 and 06514 have one clip of ten seconds each with human boxes (`benchmarks.data.junction`
tells more). The detector `without-CAMERA` trains on the first four fifths of the two other clips, validates on what is
left of them, and is tested on the whole clip of its camera: one unit, so no interval.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.data import splits
from benchmarks.data.domains import INIT
from benchmarks.data.files import CocoSplit, copy_whole, frames_of, need, once, rows_of, say
from benchmarks.data.junction import GAP_FRAMES, HUMAN_CLIPS, HUMAN_STEP, boxes_by_frame, stem_of

Item = TypeVar("Item")
SHARES = (80, 20)


def dealt(cameras: Mapping[str, Sequence[Item]], left_out: str) -> dict[str, dict[str, list[Item]]]:
    """Split -> camera -> its frames: the camera left out is test, the others are cut in time, some frames apart."""
    found: dict[str, dict[str, list[Item]]] = {"train": {}, "val": {}, "test": {left_out: list(cameras[left_out])}}
    for camera, frames in cameras.items():
        if camera != left_out:
            learnt, judged = splits.contiguous(frames, SHARES)
            found["train"][camera], found["val"][camera] = learnt, judged[GAP_FRAMES // HUMAN_STEP :]
    return found


def prepare(data: Path, out: Path) -> dict[str, Any]:
    """Write every detector's frames, the clips that the box plays and what training starts from; returns the counts."""
    videos = data / "videos"
    copy_whole(need(data / "models" / INIT), out / "init" / "fastestdet.pth")
    clips = {camera: need(videos / f"tfl_{camera}" / f"{name}.mp4") for camera, name in HUMAN_CLIPS.items()}
    counts = {}
    for camera, clip in clips.items():
        say(f"without camera {camera}")
        copy_whole(clip, out / "clips" / f"{camera}.mp4")
        counts[f"without-{camera}"] = once(out / "data" / f"without-{camera}", partial(_write, clips, camera))
    return counts


def _write(clips: dict[str, Path], left_out: str, folder: Path) -> dict[str, Any]:
    every = {camera: _frames(clip) for camera, clip in clips.items()}
    counts: dict[str, Any] = {}
    for split, by_camera in dealt(every, left_out).items():
        coco = CocoSplit(folder / split, ["vehicle"])
        for camera, frames in by_camera.items():
            for number, image, boxes in frames:
                coco.add(stem_of(camera, number), image, boxes)
        counts[split] = {"cameras": len(by_camera), **coco.close()}
    return counts


def _frames(clip: Path) -> list[tuple[int, Any, list[splits.Box]]]:
    boxes = boxes_by_frame(rows_of(clip.with_name(f"{clip.name}.gt.jsonl")))
    return [(number, image, boxes[number]) for number, image in frames_of(clip) if number % HUMAN_STEP == 0]
