"""A box's own work: its processor time for a frame beside that of a bare loop over the same footage and networks.

    OMP_NUM_THREADS=1 python -m benchmarks.serving.own_work box.yaml [--seconds 40] [--turns 3]

The loop decodes every frame of each camera's file, as the box does, prepares those of the wanted rate with OpenCV and
runs them in plain sessions of ONNX Runtime. Both are counted by frame received, from the first result on: for the box
between two moments, so that its start is left out. `loop_ms` is the loop as fast as it can, `paced_loop_ms` at the
cameras' rates: a processor that wakes up for each frame finds other data in its caches. `first_result_s` is the
processor time of a start to its first result. All are measured `--turns` times in turns, and the least counts. Prepare
the bundle first, let cameras loop, and name a sink of the kind jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.engines.mapped import write_originals
from benchmarks.machine import machine
from gemel.edge_runtime.capture.sources import CameraConfig
from gemel.edge_runtime.life.config import BoxConfig, load_config
from gemel.models.bundle import open_bundle

START_S, LOOP_FRAMES = 120.0, 150


def loop_ms(config: BoxConfig, folder: Path, paced_s: float | None = None) -> float:
    """Milliseconds of processor time of the bare loop for a frame that it runs: LOOP_FRAMES of each camera, or those of
    `paced_s` seconds at the cameras' rates, all cameras beside each other, a thread each."""
    import numpy as np
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    loops, count = [], 0
    for query in open_bundle(config.bundle).queries:
        session = onnxruntime.InferenceSession(str(folder / f"{query.id}.onnx"), options)
        entrance = session.get_inputs()[0]
        session.run(None, {entrance.name: np.zeros((1, 3, *entrance.shape[2:]), np.float32)})
        camera = config.cameras[query.camera]
        frames = LOOP_FRAMES if paced_s is None else max(1, round(paced_s * (camera.fps or 1)))
        loops.append(threading.Thread(target=play_camera, args=(camera, session, paced_s is not None, frames)))
        count += frames
    begun = time.process_time()
    for loop in loops:
        loop.start()
        if paced_s is None:
            loop.join()
    for loop in loops:
        loop.join()
    return 1000 * (time.process_time() - begun) / count


def play_camera(camera: CameraConfig, session: Any, is_paced: bool, frames: int) -> None:
    """Decode a camera's file from its start, again and again, and run so many frames at the wanted rate."""
    import av
    import cv2
    import numpy as np

    entrance = session.get_inputs()[0]
    height, width = entrance.shape[2:]
    taken, began, decoded = 0, time.monotonic(), 0
    while taken < frames:
        with av.open(str(camera.source)) as container:
            stream = container.streams.video[0]
            stream.thread_count = 1
            rate = float(stream.average_rate or 1)
            step = max(1, round(rate / (camera.fps or 1)))
            for place, frame in enumerate(container.decode(stream)):
                if is_paced:
                    time.sleep(max(0.0, began + decoded / rate - time.monotonic()))
                decoded += 1
                if place % step == 0 and taken < frames:
                    picture = cv2.resize(frame.to_ndarray(format="rgb24"), (width, height))
                    values = np.ascontiguousarray(picture.transpose(2, 0, 1)[None], np.float32) / 255
                    session.run(None, {entrance.name: values})
                    taken += 1
                if taken == frames:
                    return


def processor_s(pid: int) -> float:
    """The processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def box_ms(config: BoxConfig, results: Path, seconds: float) -> dict[str, Any]:
    """Milliseconds of a box for a frame that it answered, and the processor time of its start."""
    results.unlink(missing_ok=True)
    command = [sys.executable, "-m", "gemel", "run", str(config.path)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
        ends = time.monotonic() + START_S
        while not (results.exists() and results.stat().st_size) and time.monotonic() < ends:
            time.sleep(0.01)
        first_s = processor_s(process.pid)
        time.sleep(5)
        before, answered = processor_s(process.pid), len(results.read_bytes().splitlines())
        time.sleep(seconds)
        spent, count = processor_s(process.pid) - before, len(results.read_bytes().splitlines()) - answered
        process.send_signal(signal.SIGTERM)
    return {"first_result_s": first_s, "frames": count, "ms": round(1000 * spent / count, 2)}


def main() -> None:
    """Measure both and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    config = load_config(options.config)
    results = next(Path(sink.path) for sink in config.sinks if sink.kind == "jsonl")  # type: ignore[attr-defined]
    turns = []
    with tempfile.TemporaryDirectory(prefix="gemel-") as name:
        write_originals(config.bundle, Path(name))
        for _ in range(options.turns):
            loops = {
                "loop_ms": loop_ms(config, Path(name)),
                "paced_loop_ms": loop_ms(config, Path(name), options.seconds),
            }
            turns.append(loops | box_ms(config, results, options.seconds))
    least = {key: round(min(turn[key] for turn in turns), 2) for key in (*loops, "ms", "first_result_s")}
    own = {
        "own_ms": round(least["ms"] - least["loop_ms"], 2),
        "paced_own_ms": round(least["ms"] - least["paced_loop_ms"], 2),
    }
    print(json.dumps({"machine": machine(), **least, **own, "turns": turns}))


if __name__ == "__main__":
    main()
