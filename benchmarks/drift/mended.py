"""Shows what mending is for: a merged bundle meets streets of London by night, learns again, and is measured elsewhere.

Usage: python -m benchmarks.drift.mended --demo DIR --data DIR --out DIR [--frames 600]

`--demo` is what `gemel demo --out DIR` left, `--data` the real footage. The box's engine answers frames of one night
clip for each query of the demo, stretched to the size of its cameras, and leaves a spool; `gemel drift mend` makes a
bundle of it. Both bundles are then compared with the originals on frames of another clip of that night.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from benchmarks.machine import machine
from gemel.drift import check_drift
from gemel.drift_mend import mend_drift
from gemel.edge_runtime.engines.torch_engine import TorchEngine
from gemel.edge_runtime.frames.queues import Frame
from gemel.edge_runtime.frames.results import RunIdentity, result_record
from gemel.edge_runtime.frames.samples import sample_bytes, sample_name
from gemel.models.bundle import Bundle, open_bundle
from gemel.models.files.video import Video
from gemel.models.notes import add_note

BUNDLE, WORKLOAD = "sample.safetensors", "workload.yaml"
SIZE = (640, 360)
LONDON = "videos/tfl_a13_625"
LEARNED, OTHER = f"{LONDON}/625_201709042122.mp4", f"{LONDON}/625_201709042126.mp4"
INTERVAL_S = 60.0


def main() -> None:
    """Run it and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--learned", default=LEARNED, help="The clip of the spool, in the folder --data.")
    parser.add_argument("--other", default=OTHER, help="The clip that measures.")
    parser.add_argument("--frames", type=int, default=600)
    options = parser.parse_args()
    out: Path = options.out.resolve()
    out.mkdir(parents=True)
    workload, path = options.demo.resolve() / WORKLOAD, out / "mended.safetensors"
    before = open_bundle(options.demo.resolve() / BUNDLE)
    fill_spool(out / "learned", before, read_frames(options.data / options.learned, options.frames))
    mended = mend_drift(out / "learned", workload, path, before.path).to_json()
    rows = {"before": measure_elsewhere(out / "other", before, workload, options)}
    if mended["out"] is not None:
        rows["after"] = measure_elsewhere(out / "again", open_bundle(path), workload, options)
    found = {
        "command": "python -m benchmarks.drift.mended", "date": f"{date.today()}", "machine": machine(),
        "learned": options.learned, "other": options.other,
        "mended": {**mended, "bundle": BUNDLE, "out": path.name}, "elsewhere": rows,
    }  # fmt: skip
    print(json.dumps(found, indent=2))


def measure_elsewhere(spool: Path, bundle: Bundle, workload: Path, options: Any) -> list[dict[str, Any]]:
    """The ratio of each query to its original on the frames of the other clip."""
    fill_spool(spool, bundle, read_frames(options.data / options.other, options.frames))
    rows = check_drift(spool, workload, bundle=bundle.path).to_json()["queries"]
    return [{key: row[key] for key in ("id", "metric", "frames", "ratio", "verdict")} for row in rows]


def read_frames(path: Path, count: int) -> Iterator[np.ndarray]:
    """At most so many frames of a clip, at even distances, of the size of the demo's cameras."""
    frames, video = [], Video(str(path), add_note)
    while video.advance():
        if (picture := video.shot()()) is not None:
            frames.append(cv2.resize(picture, SIZE, interpolation=cv2.INTER_AREA))
    video.close()
    chosen = np.linspace(0, len(frames) - 1, min(count, len(frames))).round().astype(int)
    return (frames[place] for place in chosen)


def fill_spool(spool: Path, bundle: Bundle, frames: Iterator[np.ndarray]) -> None:
    """The samples that a box leaves which runs the bundle on these frames, a minute apart."""
    folder, identity = spool / "samples", RunIdentity(bundle.digest, "0011")
    folder.mkdir(parents=True)
    engines = {}
    for query in bundle.queries:
        engine = engines[query.id] = TorchEngine(bundle, query.id)
        engine.bind(bundle.tensor)
    for index, image in enumerate(frames):
        for query in bundle.queries:
            frame = Frame(index, 0.0, 1.7e9 + INTERVAL_S * index)
            record = result_record(query, frame, engines[query.id].run([image])[0], 0.01, identity)
            (folder / sample_name(record)).write_bytes(sample_bytes(record, image, query))


if __name__ == "__main__":
    main()
