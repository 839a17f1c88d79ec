"""What a box costs beside the queries it runs, and how soon it serves.

Usage: python -m benchmarks.serving.speed [frames] [start] [--seconds N] [--rounds N] [--out FOLDER]

`frames`: 16 looped cameras of 352x288 pixels, 5 frames a second taken of 25, a trivial query on each, without anybody
watching and with a dashboard open. `start`: from the start of the process to the first result of a bundle of 100 MB,
over `python -c 'import torch, torchvision'`, in turns; the medians count. On two cores at most, one thread. Recorded in
OUT/frames.json and OUT/start.json; `python -m benchmarks.results` makes the table. Beside other work on the machine the
figures are upper bounds.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.machine import machine
from benchmarks.serving.boxes import RESULTS, TRIVIAL, trivial, write_box, write_clip
from gemel.models.zoo import build

REPOSITORY = Path(__file__).resolve().parents[2]
MEASURED = REPOSITORY / "benchmarks" / "measured" / "serving"
CAMERAS, SIZE, SERVED_FPS, ASKED_FPS = 16, (352, 288), 25.0, 5.0
CORES = 2
MODEL, INPUT_SIZE = "resnet50", 224
"""102 MB of weights."""
POLL_INTERVAL_S = 0.005
BARE = "import torch, torchvision"
ALONE = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}


def frames(folder: Path, seconds: float) -> list[dict[str, Any]]:
    """What a box of 16 cameras does and costs, alone and with a dashboard open."""
    names = [f"c{index}" for index in range(CAMERAS)]
    write_clip(folder / "c.mp4", 100, SERVED_FPS, SIZE)
    cameras = {name: {"source": "c.mp4", "loop": True, "fps": ASKED_FPS} for name in names}
    made = {name: trivial(2).eval() for name in names}
    config = write_box(folder, TRIVIAL, made, 16, cameras=cameras, factories=[TRIVIAL], budget="256MiB",
                       engine="torch", http={"bind": "127.0.0.1:0"})  # fmt: skip
    rows = []
    for more in ([], ["--watched"]):
        command = [sys.executable, "-m", "benchmarks.serving.inside", str(config), str(seconds), *more]
        done = subprocess.run(command, env=ALONE, cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
        row = json.loads(done.stdout.splitlines()[-1])
        asked = CAMERAS * ASKED_FPS * row["served_s"]
        rows.append({"watched": bool(more), "processed_share": round(row["processed"] / asked, 4), **row})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def start(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Seconds, of the clock and of the processor, of the bare imports and until a box's first result."""
    write_clip(folder / "c.mp4", 250, SERVED_FPS, SIZE)
    made = {"c": build(MODEL, ("a", "b"), {}, INPUT_SIZE, "classification")}
    write_box(folder, MODEL, made, INPUT_SIZE, cameras={"c": {"source": "c.mp4", "loop": True}}, budget="1GiB")
    results = folder / RESULTS
    rows = []
    for _ in range(rounds):
        bare = time_command([sys.executable, "-c", BARE], folder, lambda: False)
        results.unlink(missing_ok=True)
        box = time_command(
            [sys.executable, "-m", "gemel", "run", "box.yaml"],
            folder,
            lambda: results.exists() and results.stat().st_size > 0,
        )
        rows.append({"bare_s": bare[0], "bare_cpu_s": bare[1], "box_s": box[0], "box_cpu_s": box[1]})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def time_command(command: Sequence[str], folder: Path, is_there: Callable[[], bool]) -> tuple[float, float]:
    """Seconds until it is there, or the process has ended, and of the processor that the process took."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    process = subprocess.Popen(command, cwd=folder, env=ALONE, stderr=subprocess.DEVNULL)
    while process.poll() is None and not is_there():
        time.sleep(POLL_INTERVAL_S)
    took = time.perf_counter() - began
    process.kill()
    process.wait()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return round(took, 3), round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 3)


def ratio(rows: Sequence[Mapping[str, float]], of: str, to: str) -> float:
    """The median of one over the median of the other."""
    return median(row[of] for row in rows) / median(row[to] for row in rows)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="frames|start")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=MEASURED)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    for part, measure, much in (("frames", frames, given.seconds), ("start", start, given.rounds)):
        if given.parts and part not in given.parts:
            continue
        load = os.getloadavg()[0]
        with tempfile.TemporaryDirectory(prefix="gemel-speed-") as folder:
            rows = measure(Path(folder), much)  # type: ignore[operator]
        on = {**machine(), "load": round(max(load, os.getloadavg()[0]), 1)}
        row = {part: rows, "machine": on, "date": str(datetime.date.today())}
        (given.out / f"{part}.json").write_text(json.dumps(row, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
