"""The `streets` workload: YOLOX-nano, for each of three London cameras fine-tuned on the human boxes of the two others.

Each camera has one clip of ten seconds. A query's train and val frames are those of the other cameras, split in time;
its test frames are all of its own camera's. All vehicles are cars. `benchmarks.serving.events` plays what it finds.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.data import splits
from benchmarks.data.files import CocoSplit, copy_whole, frames_of, need, once, rows_of, say
from benchmarks.data.junction import GAP_FRAMES, HUMAN_CLIPS, HUMAN_STEP, boxes_by_frame, stem_of
from benchmarks.data.london import INIT

SHARES = (85, 15)
"""Of train and val, in percent of a clip."""


def prepare(data: Path, out: Path) -> dict[str, Any]:
    """Write all cameras' frames and clips and the file that training starts from; returns the counts."""
    copy_whole(need(data / "models" / INIT), out / "init" / INIT)
    clips = {camera: need(data / "videos" / f"tfl_{camera}" / f"{name}.mp4") for camera, name in HUMAN_CLIPS.items()}
    counts = {}
    for camera, clip in clips.items():
        say(f"camera {camera}: the clips of the others with human boxes")
        copy_whole(clip, out / "clips" / f"{camera}.mp4")
        query = f"c{camera}-cars"
        counts[query] = once(out / "data" / query, partial(_write_splits, clips, camera))
    return counts


def _write_splits(clips: dict[str, Path], held_out: str, folder: Path) -> dict[str, Any]:
    cocos = {split: CocoSplit(folder / split, ["car"]) for split in splits.SPLITS}
    for camera, clip in clips.items():
        boxes = boxes_by_frame(rows_of(clip.with_name(f"{clip.name}.gt.jsonl")))
        images = [(frame, image) for frame, image in frames_of(clip) if frame % HUMAN_STEP == 0]
        parts = {"test": images}
        if camera != held_out:
            train, val = splits.contiguous(images, SHARES)
            parts = {"train": train[: -GAP_FRAMES // HUMAN_STEP], "val": val}
        for split, members in parts.items():
            for frame, image in members:
                cocos[split].add(stem_of(camera, frame), image, boxes[frame])
    return {split: coco.close() for split, coco in cocos.items()}
