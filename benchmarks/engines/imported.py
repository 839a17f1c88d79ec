"""Times the engines on networks that came as ONNX files against ONNX Runtime with the file itself.

Usage: python -m benchmarks.engines.imported FILE... [--engines NAME ...] [--rounds N] [--json FILE]

One prepared frame, one thread. ONNX Runtime runs at its default, where it folds and packs weights of its own; so do
sessions, and every other engine has the shared weights of the arena. `whole` is a picture of 1280x720 pixels to
predictions. Cases take turns, round by round; ratios of medians of processor time, and of the wall's clock.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.bundles.samples import write_measured_bundle
from benchmarks.engines.engines import missing, run_in_turns, show
from benchmarks.machine import machine
from edge_runtime.engines.registry import ENGINES, SESSIONS, engine_class, make_engine, open_sessions_by
from edge_runtime.engines.setup import resident_arena
from models.bundle import BundleQuery
from models.workload import load_workload
from models.zoo import build_query

BARE = "ONNX Runtime"
QUERY = "file"


def main() -> None:
    """Measure each file; print a table and one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--engines", nargs="*", help="default: all that can run here")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="also write the JSON here")
    options = parser.parse_args()
    engines = options.engines or [name for name in ENGINES if engine_class(name).takes_tensors and not missing(name)]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rows = [row for path in options.files for row in time_file(path, engines, options.rounds, Path(folder))]
    show(rows)
    text = json.dumps({"rows": rows, "machine": machine()})
    print(text)
    if options.json:
        options.json.write_text(text)


def time_file(path: Path, engines: list[str], rounds: int, folder: Path) -> list[dict[str, Any]]:
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
    picture = np.random.default_rng(0).integers(0, 256, (720, 1280, 3), np.uint8)
    for name in SESSIONS:
        if missing(name):
            continue
        (group,) = open_sessions_by(name, bundle, [QUERY])
        cases[f"{name}, session"] = lambda engine=group[QUERY]: engine.forward(frames)
        cases[f"{name}, session, whole"] = lambda engine=group[QUERY]: engine.run([picture])
    wall, cpu = run_in_turns(cases, rounds)
    return [
        {"file": path.stem, "engine": case, "ms": round(median(cpu[case]), 2),
         "ratio": round(median(cpu[case]) / median(cpu[BARE]), 2),
         "wall_ratio": round(median(times) / median(wall[BARE]), 2)}
        for case, times in wall.items()
    ]  # fmt: skip


if __name__ == "__main__":
    main()
