"""A box that works for long beside eight cameras: what it holds over time (outside CI).

Usage: python -m tests.faults.soak --minutes 60 [--out FILE] [--network FILE.onnx --clips FILE... --fps 5]

Looped clips, a query on each, results to a file that is rotated, HTTP asked every few seconds. With a detector as an
ONNX file each camera plays one of the given clips in its own size, and has tracks, events, and clips of these. Memory
is what no file stands behind; its slope is that of the straight line through the samples after the first ten minutes,
or after the first third of a shorter run, which then says how short it was. The slope's error is one standard
deviation, from the means of PARTS parts of the run, since samples seconds apart are not independent.

`parts` has, once a minute, what a slope consists of: what mappings hold by kind (the C heap, its arenas, stacks, other
anonymous memory), what of the C heap is in use and what is free, Python's blocks, and the sizes of the box's buffers.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import io
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import gemel
from benchmarks.machine import machine
from tests.edge_runtime.running import Running, adds_up, total
from tests.edge_runtime.tiny import write_clip
from tests.faults.cameras import HTTP, SIZE
from tests.faults.inside import INSIDE_FILE
from tests.faults.queries import FACTORIES, one_each

CAMERAS, FPS, ASKED_FPS = 8, 25.0, 5.0
WARM_S, INTERVAL_S, PARTS = 600.0, 5.0, 8
MAX_SLOPE_BYTES = 1e6
"""In an hour."""
ARENA_BYTES = 64 * 2**20
"""glibc's arenas begin at multiples of this."""


def write_tiny_box(folder: Path) -> dict[str, Any]:
    """The files of a box of trivial queries on one rendered clip, and the keys of its config."""
    names = [f"c{index}" for index in range(CAMERAS)]
    one_each(folder, names)
    write_clip(folder / "c.mp4", 250, FPS, size=SIZE)
    cameras = {name: {"source": "c.mp4", "loop": True, "fps": ASKED_FPS} for name in names}
    return {"cameras": cameras, "factories": FACTORIES}


def write_real_box(folder: Path, network: Path, clips: Sequence[Path], fps: float) -> dict[str, Any]:
    """The files of a box whose cameras play these clips in turn, each asked by this detector, with all kinds of work
    beside it; and the keys of its config."""
    names = [f"c{index}" for index in range(CAMERAS)]
    files = [shutil.copy(network, folder / f"{name}.onnx") for name in names]
    with contextlib.redirect_stdout(io.StringIO()):
        gemel.pack(files, folder / "tiny.safetensors")
    cameras = {
        name: {"source": str(clips[index % len(clips)].resolve()), "loop": True, "fps": fps}
        for index, name in enumerate(names)
    }
    events = [{"kind": "enter", "zone": "near"}, {"kind": "leave", "zone": "near"}, {"kind": "cross", "line": "kerb"}]
    query = {
        "tracking": True, "zones": {"near": [[0, 0.4], [1, 0.4], [1, 1], [0, 1]]},
        "lines": {"kerb": [[0, 0.6], [1, 0.6]]}, "events": events, "motion_gating": True,
    }  # fmt: skip
    return {
        "cameras": cameras, "queries": dict.fromkeys(names, query), "engine": "onnx", "budget": "1GiB",
        "factories": None, "clips": {"path": "clips", "max_bytes": "64MiB"},
    }  # fmt: skip


def soak(folder: Path, minutes: float, keys: dict[str, Any], every_s: float = INTERVAL_S) -> dict[str, Any]:
    """Run a box of these keys so long: samples of [seconds, memory bytes, threads, descriptors], and what follows."""
    sinks = [{"kind": "jsonl", "path": "results.jsonl", "max_bytes": "1MiB", "keep": 3}]
    names, fps = list(keys["cameras"]), next(iter(keys["cameras"].values()))["fps"]
    samples, mappings = list[list[float]](), list[dict[str, int]]()
    with Running(folder, "-m", "tests.faults.inside", sinks=sinks, http=HTTP, **keys) as box:
        box.until(lambda: box.status()["queries"][-1]["ledger"]["processed"], 300.0)
        began = time.monotonic()
        while (now := time.monotonic() - began) < 60 * minutes:
            assert box.process.poll() is None, box.read_stderr()
            samples.append([round(now, 1), *box.measure_usage().values()])
            for path in ("/metrics", "/api/status", f"/api/cameras/{names[len(samples) % CAMERAS]}/frame.jpg"):
                box.get(path, 30.0)
            if len(samples) % 12 == 1:
                mappings.append(measure_mappings(box.process.pid))
                print(f"{now / 60:.0f} of {minutes:g} min: {samples[-1][1] / 1e6:.1f} MB", flush=True)
            time.sleep(every_s)
        cpu_s, ended, summary = box.cpu_s(), box.stop(), box.ledger()
    path = folder / INSIDE_FILE
    inside = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    took = summary["seconds"]
    warm_s = min(WARM_S, 20 * minutes)
    return {
        "minutes": minutes, "cameras": CAMERAS, "warm_s": warm_s, "samples": samples,
        "slope_bytes_per_hour": slope(samples, warm_s), "slope_error": slope_error(samples, warm_s),
        "threads_more": _more(samples, warm_s, 2), "descriptors_more": _more(samples, warm_s, 3),
        "received": total(summary, "received"), "processed": total(summary, "processed"),
        "asked": round(CAMERAS * fps * took), "fps": fps, "parts": {"mappings": mappings, "inside": inside},
        "adds_up": adds_up(summary), "exit_code": ended, "core_share": round(cpu_s / took, 3),
    }  # fmt: skip


def measure_mappings(pid: int) -> dict[str, int]:
    """Bytes of a process that no file stands behind, by kind of mapping."""
    found, kind = Counter[str](), ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            begin, end = (int(number, 16) for number in words[0].split("-"))
            name = words[5] if len(words) > 5 else ""
            is_arena = begin % ARENA_BYTES == 0 and end - begin <= ARENA_BYTES
            kind = "arenas" if not name and is_arena else "other" if not name else name.strip("[]")
            kind = "files" if kind.startswith("/") else kind
            found["arenas_count"] += kind == "arenas"
        elif words[0] == "Anonymous:":
            found[kind] += 1024 * int(words[1])
    return dict(found)


def slope(samples: Sequence[Sequence[float]], warm_s: float) -> float:
    """Bytes an hour of the straight line through the samples after `warm_s` seconds (least squares)."""
    kept = np.array([one[:2] for one in samples if one[0] >= warm_s])
    return round(float(np.polyfit(kept[:, 0] / 3600, kept[:, 1], 1)[0]))


def slope_error(samples: Sequence[Sequence[float]], warm_s: float) -> float | None:
    """The standard error of the slope, in bytes an hour; None with too few samples."""
    kept = np.array([one[:2] for one in samples if one[0] >= warm_s])
    if len(kept) < 2 * PARTS:
        return None
    hours, values = np.array([part.mean(0) for part in np.array_split(kept, PARTS)]).T / [[3600], [1]]
    line = np.polyfit(hours, values, 1)
    rest = values - np.polyval(line, hours)
    return round(float(np.sqrt((rest**2).sum() / (PARTS - 2) / ((hours - hours.mean()) ** 2).sum())))


def _more(samples: Sequence[Sequence[float]], warm_s: float, place: int) -> float:
    """The median of the last part less that of the first: clips that are being written have descriptors, too."""
    parts = np.array_split([one[place] for one in samples if one[0] >= warm_s], PARTS)
    return float(np.median(parts[-1]) - np.median(parts[0]))


def main() -> int:
    """The command; 1 where memory grows by more than it may."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--network", type=Path)
    parser.add_argument("--clips", type=Path, nargs="+")
    parser.add_argument("--fps", type=float, default=ASKED_FPS)
    parser.add_argument("--out", type=Path, default=Path("out/faults/soak.json"))
    given = parser.parse_args()
    if bool(given.network) != bool(given.clips):
        parser.error("--network and --clips go together")
    given.out.parent.mkdir(parents=True, exist_ok=True)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="gemel-soak-") as folder:
        place = Path(folder)
        keys = write_real_box(place, given.network, given.clips, given.fps) if given.network else write_tiny_box(place)
        row = soak(place, given.minutes, keys)
    on = {**machine(), "load": round(max(load, os.getloadavg()[0]), 1)}
    given.out.write_text(json.dumps({**row, "machine": on, "date": str(datetime.date.today())}) + "\n")
    shown = {key: value for key, value in row.items() if key not in ("samples", "parts")}
    print(json.dumps(shown, indent=2))
    return 0 if row["slope_bytes_per_hour"] < MAX_SLOPE_BYTES and row["adds_up"] else 1


if __name__ == "__main__":
    sys.exit(main())
