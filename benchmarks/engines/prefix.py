"""Queries of one camera with a common prefix against their originals with memory for everything: frames by wall clock.

Usage: python -m benchmarks.engines.prefix ORIGINALS MERGED FRAMES --json FILE [--rounds N]

ORIGINALS is the bundle of `gemel merge --method none`, MERGED that of `gemel merge --share-prefix`, FRAMES a folder of
pictures of their camera. Each bundle runs in a box of its own (engine `torch`, one thread, 4 GiB): every round puts one
frame for all queries and runs the scheduler until all are answered, in turns in one process. The ratio is that of the
median rounds.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import cv2
import numpy as np
import torch
import yaml

from benchmarks.machine import machine
from gemel.edge_runtime.frames.queues import Frame
from gemel.edge_runtime.life.daemon import prepare
from gemel.edge_runtime.life.runtime import Runtime
from gemel.edge_runtime.sinks.worker import SinkManager
from gemel.models.bundle import open_bundle
from gemel.models.sharing.flop_rates import flop_rates


def start_box(folder: Path, bundle: Path) -> Runtime:
    """A box without cameras of its own that has warmed up."""
    cameras = sorted({query.camera for query in open_bundle(bundle).queries})
    document = {
        "bundle": str(bundle.resolve()), "budget": "4GiB", "device": "cpu", "engine": "torch", "late": "publish",
        "cameras": {camera: {"source": "push"} for camera in cameras}, "http": {"token_file": "token"},
        "sinks": [{"kind": "jsonl", "path": "results.jsonl"}],
    }  # fmt: skip
    folder.mkdir()
    token = folder / "token"
    token.touch(0o600)
    token.write_text(secrets.token_hex(32), encoding="utf-8")
    path = folder / "box.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    box, _ = prepare(path)
    runtime = Runtime(box, SinkManager(()), None, None)
    runtime.active.executor.warm_up(box.costed.loaded.blank_frames())
    return runtime


def run_frame(runtime: Runtime, index: int, image: np.ndarray) -> float:
    """Seconds in which a box answers all queries for a frame."""
    start, now = time.perf_counter(), time.monotonic()
    for query in runtime.active.box.costs.queries:
        runtime.mailboxes.put(query, Frame(index, now, time.time(), image))
    while runtime.active.executor.step():
        pass
    return time.perf_counter() - start


def count_answers(runtime: Runtime) -> int:
    """Frames that were processed, of all queries."""
    return sum(row["processed"] for row in runtime.ledger.to_json())


def measure(originals: Path, merged: Path, images: list[np.ndarray], rounds: int) -> dict[str, Any]:
    """Seconds of both boxes for a frame of all queries, in turns."""
    seconds: dict[str, list[float]] = {"originals": [], "merged": []}
    with tempfile.TemporaryDirectory() as folder:
        boxes = {
            name: start_box(Path(folder) / name, path)
            for name, path in (("originals", originals), ("merged", merged))
        }  # fmt: skip
        for index in range(rounds + 1):
            for name, runtime in boxes.items():
                took = run_frame(runtime, index, images[index % len(images)])
                if index:
                    seconds[name].append(took)
        answers = {name: count_answers(runtime) for name, runtime in boxes.items()}
        joint = boxes["merged"].active.executor.joint
        passes = {"runs": joint.runs, "queries": joint.queries, "frames": joint.frames}
    halves = {name: median(own) for name, own in seconds.items()}
    bundle = open_bundle(merged)
    keys = ("ratio", "merged", "original")
    evidence = {query.id: {key: (query.evidence or {}).get(key) for key in keys} for query in bundle.queries}
    rates = flop_rates(bundle, {query.id: query.fps or 1.0 for query in bundle.queries})
    return {
        "frame_s": halves, "frames_ratio": halves["originals"] / halves["merged"], "answers": answers, "passes": passes,
        "evidence": evidence, **rates.to_json(),
        "bytes": {"before": bundle.manifest.bytes.before, "after": bundle.manifest.bytes.after},
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("originals", type=Path, metavar="ORIGINALS")
    parser.add_argument("merged", type=Path, metavar="MERGED")
    parser.add_argument("frames", type=Path, metavar="FRAMES")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="where to write what was measured")
    parser.add_argument("--rounds", type=int, default=60, help="frames of each box; 60 unless given")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    pictures = [cv2.imread(str(path)) for path in sorted(given.frames.iterdir())]
    images = [cv2.cvtColor(picture, cv2.COLOR_BGR2RGB) for picture in pictures if picture is not None]
    document = {
        "command": "python -m benchmarks.engines.prefix", "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine(), **measure(given.originals, given.merged, images, given.rounds),
    }  # fmt: skip
    given.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({key: document[key] for key in ("frame_s", "frames_ratio", "passes", "evidence")}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
