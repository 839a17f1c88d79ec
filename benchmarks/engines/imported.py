"""Times the engines on networks that came as ONNX files against ONNX Runtime with the file itself.

Usage: python -m benchmarks.engines.imported FILE... [--engines NAME ...] [--picture FILE] [--rounds N] [--json FILE]

One prepared frame, one thread. ONNX Runtime runs at its default, where it folds and packs weights of its own; so do
sessions, and every other engine has the shared weights of the arena. `whole` is a picture (noise of 1280x720 pixels, or
`--picture`) to predictions; ONNX Runtime's is a script as YOLOX documents it, with OpenCV and NumPy, for files of that
family. Cases take turns, round by round; ratios of medians of processor time, and of the wall's clock, `whole` ones to
ONNX Runtime's whole where that ran.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import cv2
import numpy as np
import torch

from benchmarks.bundles.samples import write_measured_bundle
from benchmarks.engines.engines import missing, run_in_turns, show
from benchmarks.machine import machine
from edge_runtime.engines.registry import ENGINES, SESSIONS, engine_class, make_engine, open_sessions_by
from edge_runtime.engines.setup import resident_arena
from models.bundle import BundleQuery
from models.pictures import read_picture
from models.workload import load_workload
from models.zoo import build_query

BARE = "ONNX Runtime"
WHOLE = ", whole"
STRIDES = (8, 16, 32)
MIN_SCORE, NMS_IOU = 0.1, 0.45
"""Of the script's boxes, as in YOLOX's own."""
QUERY = "file"


def main() -> None:
    """Measure each file; print a table and one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--engines", nargs="*", help="default: all that can run here")
    parser.add_argument("--picture", type=Path, help="a picture for whole runs; noise unless given")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="also write the JSON here")
    options = parser.parse_args()
    picture = np.random.default_rng(0).integers(0, 256, (720, 1280, 3), np.uint8)
    if options.picture is not None:
        picture = read_picture(options.picture)
    engines = options.engines or [name for name in ENGINES if engine_class(name).takes_tensors and not missing(name)]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            row for path in options.files for row in time_file(path, engines, picture, options.rounds, Path(folder))
        ]
    show(rows)
    text = json.dumps({"rows": rows, "machine": machine()})
    print(text)
    if options.json:
        options.json.write_text(text)


def time_file(path: Path, engines: list[str], picture: np.ndarray, rounds: int, folder: Path) -> list[dict[str, Any]]:
    """Milliseconds of a frame and the ratio to ONNX Runtime, of each engine."""
    import onnxruntime

    keys = {"id": QUERY, "camera": "one", "model": str(path.resolve())}
    (folder / "w.yaml").write_text(json.dumps({"cameras": {"one": {"source": "one.mp4"}}, "queries": [keys]}))
    query = load_workload(folder / "w.yaml").query(QUERY)
    model, record = build_query(query).eval(), BundleQuery.of(query)
    bundle = write_measured_bundle(folder / f"{path.stem}.safetensors", {QUERY: model}, [record])
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = settings.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
    frames = torch.rand(1, 3, *record.preprocess.size)
    feed = {session.get_inputs()[0].name: frames.numpy()}
    cases: dict[str, Callable[[], object]] = {BARE: lambda: session.run(None, feed)}
    arenas = []
    for name in engines:
        engine = make_engine(name, bundle, QUERY)
        engine.prepare()
        arenas.append(resident_arena(bundle, {QUERY: engine}))
        cases[name] = lambda engine=engine: engine.forward(frames)
    if getattr(getattr(model, "decoder", None), "name", None) == "yolox":
        cases[BARE + WHOLE] = lambda: run_script(session, picture)
    for name in SESSIONS:
        if missing(name):
            continue
        (group,) = open_sessions_by(name, bundle, [QUERY])
        cases[f"{name}, session"] = lambda engine=group[QUERY]: engine.forward(frames)
        cases[f"{name}, session{WHOLE}"] = lambda engine=group[QUERY]: engine.run([picture])
    wall, cpu = run_in_turns(cases, rounds)
    rivals = {case: BARE + WHOLE if case.endswith(WHOLE) and BARE + WHOLE in cases else BARE for case in cases}
    return [
        {"file": path.stem, "engine": case, "ms": round(median(cpu[case]), 2),
         "ratio": round(median(cpu[case]) / median(cpu[rivals[case]]), 2),
         "wall_ratio": round(median(times) / median(wall[rivals[case]]), 2)}
        for case, times in wall.items()
    ]  # fmt: skip


def run_script(session: Any, picture: np.ndarray) -> list[tuple[np.ndarray, float, int]]:
    """Boxes (x, y, width, height), scores and classes of an RGB picture by a YOLOX session, without our code."""
    (given,) = session.get_inputs()
    height, width = given.shape[2:]
    scale = min(height / picture.shape[0], width / picture.shape[1])
    resized = cv2.resize(picture, (int(picture.shape[1] * scale), int(picture.shape[0] * scale)))
    padded = np.full((height, width, 3), 114, np.uint8)
    padded[: resized.shape[0], : resized.shape[1]] = cv2.cvtColor(resized, cv2.COLOR_RGB2BGR)
    (found,) = session.run(None, {given.name: np.ascontiguousarray(padded.transpose(2, 0, 1)[None], np.float32)})
    rows = found[0]
    sides = [(height // stride, width // stride) for stride in STRIDES]
    grid = np.concatenate([np.indices(side)[::-1].reshape(2, -1).T for side in sides])
    strides = np.concatenate([np.full((high * wide, 1), stride) for (high, wide), stride in zip(sides, STRIDES)])
    sizes = np.exp(rows[:, 2:4]) * strides
    boxes = np.concatenate([(rows[:, :2] + grid) * strides - sizes / 2, sizes], axis=1) / scale
    scores = rows[:, 4:5] * rows[:, 5:]
    places, classes = np.nonzero(scores > MIN_SCORE)
    strong = scores[places, classes]
    suppress: Any = cv2.dnn.NMSBoxesBatched  # its stubs know lists alone
    kept = suppress(boxes[places], strong, classes.astype(np.int32), MIN_SCORE, NMS_IOU)
    return [(boxes[places[one]], float(strong[one]), int(classes[one])) for one in kept]


if __name__ == "__main__":
    main()
