"""The `junction` workload: London traffic cameras, 352x288, Powered by TfL Open Data.

Camera a13 (625, A13/Woolwich Manor Way) has 23 clips of ten seconds on seven days. Its boxes are those of a
machine teacher, score 0.27 and above, so an F1 here is agreement with that teacher: it leaves out distant
vehicles, and at night most of the oncoming ones. Cameras 03601, 03604 and 06514 have one clip of ten seconds
each with human boxes: split in time inside that clip, they prove little. `a13-kind` tells cars from large vehicles on
crops of the teacher's boxes, by day again.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data import splits
from benchmarks.data.files import CocoSplit, copy_whole, frames_of, need, once, rows_of, say, write_image

VEHICLES = ("car", "bus", "truck")
TEACHER_SCORE = 0.27
TEACHER_STEP = 5  # the teacher looked at every fifth frame
HUMAN_STEP = 2
MS_PER_FRAME = 40  # every clip has 25 frames a second
GAP_FRAMES = 10  # 0.4 s between two splits of one clip

# No day is in two splits. The one evening (20170904: one busy clip, two at night) trains, so night is not
# tested; quiet, middling and busy clips are in train and in test; 20170831 is an afternoon peak.
A13_DAYS = {
    "20170722": "train", "20170904": "train", "20170914": "train",
    "20170831": "val",
    "20170721": "test", "20170810": "test", "20170917": "test",
}  # fmt: skip
A13_PLAYED = "625_201709171311"  # the clip of the test split that the box plays

HUMAN_CLIPS = {"03601": "2019-06-28_03601", "03604": "2019-06-29_03604", "06514": "2019-06-28_06514"}
KINDS = {"03604": ("car", "bus")}
LARGE = ("bus", "truck")
CARS_PER_CLIP = 40  # of up to 1300; large vehicles are few, and all are taken
CROP_MARGIN = 0.15
CROP_MIN_SIDE_PX = 14
CROPS_PER_TRACK = 40
CROP_MAX_COVERED = 0.4
INIT_WEIGHTS = {
    "mobilenet_v2.pth": "mobilenet_v2_from_coral_ptq.pth",
    "squeezenet1_0.pth": "squeezenet1_0_from_deepcompression.pth",
}


def prepare(data: Path, out: Path) -> dict[str, Any]:
    """Write all queries' data, the clips that the box plays and the weights that training starts from."""
    videos = data / "videos"
    for name, source in INIT_WEIGHTS.items():
        copy_whole(need(data / "models" / source), out / "init" / name)
    say("camera a13: 23 clips")
    counts = {"a13-vehicles": once(out / "data" / "a13-vehicles", partial(_a13, videos / "tfl_a13_625"))}
    counts["a13-kind"] = once(out / "data" / "a13-kind", partial(_a13_kinds, videos / "tfl_a13_625"))
    copy_whole(need(videos / "tfl_a13_625" / f"{A13_PLAYED}.mp4"), out / "clips" / "a13.mp4")
    for camera, name in HUMAN_CLIPS.items():
        say(f"camera {camera}: one clip with human boxes")
        clip = need(videos / f"tfl_{camera}" / f"{name}.mp4")
        copy_whole(clip, out / "clips" / f"{camera}.mp4")
        query = f"c{camera}-vehicles"
        counts[query] = once(out / "data" / query, partial(write_human_splits, clip, camera))
        if camera in KINDS:
            query = f"c{camera}-kind"
            counts[query] = once(out / "data" / query, partial(_kinds, clip, camera))
    return counts


def boxes_by_frame(rows: list[dict[str, Any]]) -> dict[int, list[splits.Box]]:
    """Frame number -> its vehicles' boxes; a teacher's count from a score of TEACHER_SCORE on."""
    boxes: dict[int, list[splits.Box]] = defaultdict(list)
    for row in rows:
        if row["class"] in VEHICLES and row.get("score", 1.0) >= TEACHER_SCORE:
            boxes[row["frame"]].append(tuple(row["box"]))
    return boxes


def stem_of(unit: str, frame: int) -> str:
    """The name of a frame's file: its unit, and when it was shown."""
    return f"{unit}__{frame * MS_PER_FRAME:06d}"


def _a13(videos: Path, folder: Path) -> dict[str, Any]:
    counts = {}
    clips = sorted(path.stem for path in need(videos).glob("625_*.mp4"))
    for split, members in splits.by_day(clips, A13_DAYS).items():
        coco = CocoSplit(folder / split, ["vehicle"])
        for clip in members:
            path = videos / f"{clip}.mp4"
            boxes = boxes_by_frame(rows_of(videos / f"{clip}.mp4.teacher.jsonl"))
            for frame, image in frames_of(path):
                if frame % TEACHER_STEP == 0:
                    coco.add(stem_of(clip, frame), image, boxes[frame])
        counts[split] = {"clips": len(members), **coco.close()}
    return counts


def crops_by_size(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """One clip's boxes that show enough of a car or of a large vehicle, in order; cars thinned."""
    rows = [row for row in rows if row["class"] in VEHICLES and row["score"] >= TEACHER_SCORE]
    seen = [row for row in rows if _shows_enough(row, [other for other in rows if other["frame"] == row["frame"]])]
    large = [row for row in seen if row["class"] in LARGE]
    return {"car": splits.thin([row for row in seen if row not in large], CARS_PER_CLIP), "large": large}


def _a13_kinds(videos: Path, folder: Path) -> dict[str, Any]:
    counts: dict[str, Any] = {split: {"car": 0, "large": 0} for split in splits.SPLITS}
    clips = sorted(path.stem for path in need(videos).glob("625_*.mp4"))
    for split, members in splits.by_day(clips, A13_DAYS).items():
        for clip in members:
            path = videos / f"{clip}.mp4"
            wanted: dict[int, list[tuple[str, splits.Box]]] = defaultdict(list)
            for label, rows in crops_by_size(rows_of(videos / f"{clip}.mp4.teacher.jsonl")).items():
                counts[split][label] += len(rows)
                for row in rows:
                    wanted[row["frame"]].append((label, tuple(row["box"])))
            for frame, image in frames_of(path):
                for number, (label, box) in enumerate(wanted[frame]):
                    _write_crop(image, box, folder / split / label / f"{stem_of(clip, frame)}-{number:02d}.jpg")
    return counts


def write_human_splits(clip: Path, camera: str, folder: Path, label: str = "vehicle") -> dict[str, Any]:
    """Write every second frame of a clip with its human boxes of one class, split in time; returns the counts."""
    rows = rows_of(clip.with_name(f"{clip.name}.gt.jsonl"))
    boxes = boxes_by_frame([row for row in rows if label in ("vehicle", row["class"])])
    images = [(frame, image) for frame, image in frames_of(clip) if frame % HUMAN_STEP == 0]
    counts = {}
    for split, members in splits.in_time(images, gap=GAP_FRAMES // HUMAN_STEP).items():
        coco = CocoSplit(folder / split, [label])
        for frame, image in members:
            coco.add(stem_of(camera, frame), image, boxes[frame])
        counts[split] = coco.close()
    return counts


def usable_crops(rows: list[dict[str, Any]], classes: tuple[str, ...]) -> dict[int, list[dict[str, Any]]]:
    """Rows by track that show enough of a vehicle of one of these classes: not occluded, not too small."""
    boxes_of_frame: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        boxes_of_frame[row["frame"]].append(row)
    tracks: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if row["class"] in classes and not row["occluded"] and _shows_enough(row, boxes_of_frame[row["frame"]]):
            tracks[row["track"]].append(row)
    return {track: splits.thin(members, CROPS_PER_TRACK) for track, members in sorted(tracks.items())}


def _shows_enough(row: dict[str, Any], of_frame: list[dict[str, Any]]) -> bool:
    x0, y0, x1, y1 = row["box"]
    others = [tuple(other["box"]) for other in of_frame if other is not row]
    large = min(x1 - x0, y1 - y0) >= CROP_MIN_SIDE_PX
    return large and splits.overlap_fraction((x0, y0, x1, y1), others) <= CROP_MAX_COVERED


def _write_crop(image: np.ndarray, box: splits.Box, path: Path) -> None:
    height, width = image.shape[:2]
    x0, y0, x1, y1 = splits.with_margin(box, CROP_MARGIN, width, height)
    write_image(path, image[y0:y1, x0:x1])


def _kinds(clip: Path, camera: str, folder: Path) -> dict[str, Any]:
    classes = KINDS[camera]
    tracks = usable_crops(rows_of(clip.with_name(f"{clip.name}.gt.jsonl")), classes)
    middle = {track: members[len(members) // 2]["box"] for track, members in tracks.items()}
    sizes = {track: (x1 - x0) * (y1 - y0) for track, (x0, y0, x1, y1) in middle.items()}
    dealt = splits.by_track({track: members[0]["class"] for track, members in tracks.items()}, sizes)
    wanted: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for members in tracks.values():
        for row in members:
            wanted[row["frame"]].append(row)
    counts: dict[str, Any] = {split: {name: {"tracks": 0, "crops": 0} for name in classes} for split in splits.SPLITS}
    for track, members in tracks.items():
        counts[dealt[track]][members[0]["class"]]["tracks"] += 1
    for frame, image in frames_of(clip):
        for row in wanted[frame]:
            split, label = dealt[row["track"]], row["class"]
            stem = stem_of(f"{camera}-t{row['track']:02d}", frame)
            _write_crop(image, tuple(row["box"]), folder / split / label / f"{stem}.jpg")
            counts[split][label]["crops"] += 1
    return counts
