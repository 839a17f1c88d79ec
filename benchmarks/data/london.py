"""The `london` workload: one YOLOX-nano, fine-tuned from its published ONNX file on each of two London cameras.

The cameras 03604 and 06514 have one clip of ten seconds each with human boxes, split in time (see
`benchmarks.data.junction`). `gemel train OUT/workload.yaml` writes the two ONNX files; `OUT/unlabelled.yaml` asks the
same of them with the clips themselves as data, so that the originals' own answers are what is learnt and compared.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.data.files import copy_whole, need, once, say
from benchmarks.data.junction import HUMAN_CLIPS, write_human_splits

CAMERAS = ("03604", "06514")
INIT = "yolox_nano_416.onnx"
UNLABELLED = Path(__file__).resolve().parents[1] / "workloads" / "london-unlabelled.yaml"


def prepare(data: Path, out: Path) -> dict[str, Any]:
    """Write both cameras' frames and clips and the file that training starts from; returns the counts."""
    copy_whole(need(data / "models" / INIT), out / "init" / INIT)
    counts = {}
    for camera in CAMERAS:
        say(f"camera {camera}: one clip with human boxes")
        clip = need(data / "videos" / f"tfl_{camera}" / f"{HUMAN_CLIPS[camera]}.mp4")
        copy_whole(clip, out / "clips" / f"{camera}.mp4")
        query = f"c{camera}-cars"
        counts[query] = once(out / "data" / query, partial(write_human_splits, clip, camera, label="car"))
    copy_whole(UNLABELLED, out / "unlabelled.yaml")
    return counts
