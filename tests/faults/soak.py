"""A box that works for long beside eight cameras: what it holds over time (outside CI).

Usage: python -m tests.faults.soak --minutes 60 [--out FILE]

Looped clips, a query on each, results to a file that is rotated, HTTP asked every few seconds. Memory is what no
file stands behind; its slope is that of the straight line through the samples after the first ten minutes, or after
the first third of a shorter run, which then says how short it was.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import machine
from tests.edge_runtime.running import Running, adds_up, total
from tests.edge_runtime.tiny import write_clip
from tests.faults.cameras import HTTP, SIZE
from tests.faults.queries import FACTORIES, one_each

CAMERAS, FPS, ASKED_FPS = 8, 25.0, 5.0
WARM_S, INTERVAL_S = 600.0, 5.0
MAX_SLOPE_BYTES = 1e6
"""In an hour."""


def soak(folder: Path, minutes: float, every_s: float = INTERVAL_S) -> dict[str, Any]:
    """Run so long: samples of [seconds, memory bytes, threads, descriptors], and what follows from them."""
    names = [f"c{index}" for index in range(CAMERAS)]
    one_each(folder, names)
    write_clip(folder / "c.mp4", 250, FPS, size=SIZE)
    cameras = {name: {"source": "c.mp4", "loop": True, "fps": ASKED_FPS} for name in names}
    sinks = [{"kind": "jsonl", "path": "results.jsonl", "max_bytes": "1MiB", "keep": 3}]
    samples: list[list[float]] = []
    with Running(folder, cameras=cameras, sinks=sinks, factories=FACTORIES, http=HTTP) as box:
        box.until(lambda: box.status()["queries"][-1]["ledger"]["processed"])
        began = time.monotonic()
        while (now := time.monotonic() - began) < 60 * minutes:
            assert box.process.poll() is None, box.read_stderr()
            samples.append([round(now, 1), *box.measure_usage().values()])
            for path in ("/metrics", "/api/status", f"/api/cameras/{names[len(samples) % CAMERAS]}/frame.jpg"):
                box.get(path)
            if len(samples) % 12 == 1:
                print(f"{now / 60:.0f} of {minutes:g} min: {samples[-1][1] / 1e6:.1f} MB", flush=True)
            time.sleep(every_s)
        cpu_s, ended, summary = box.cpu_s(), box.stop(), box.ledger()
    took = summary["seconds"]
    warm_s = min(WARM_S, 20 * minutes)
    return {
        "minutes": minutes, "cameras": CAMERAS, "warm_s": warm_s, "samples": samples,
        "slope_bytes_per_hour": slope(samples, warm_s), "threads_more": _more(samples, warm_s, 2),
        "descriptors_more": _more(samples, warm_s, 3), "received": total(summary, "received"),
        "processed": total(summary, "processed"), "asked": round(CAMERAS * ASKED_FPS * took),
        "adds_up": adds_up(summary), "exit_code": ended, "core_share": round(cpu_s / took, 3),
    }  # fmt: skip


def slope(samples: Sequence[Sequence[float]], warm_s: float) -> float:
    """Bytes an hour of the straight line through the samples after `warm_s` seconds (least squares)."""
    kept = np.array([one[:2] for one in samples if one[0] >= warm_s])
    return round(float(np.polyfit(kept[:, 0] / 3600, kept[:, 1], 1)[0]))


def _more(samples: Sequence[Sequence[float]], warm_s: float, place: int) -> float:
    kept = [one[place] for one in samples if one[0] >= warm_s]
    return kept[-1] - kept[0]


def main() -> int:
    """The command; 1 where memory grows by more than it may."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--out", type=Path, default=Path("out/faults/soak.json"))
    given = parser.parse_args()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="gemel-soak-") as folder:
        row = soak(Path(folder), given.minutes)
    on = {**machine(), "load": round(max(load, os.getloadavg()[0]), 1)}
    given.out.write_text(json.dumps({**row, "machine": on, "date": str(datetime.date.today())}) + "\n")
    shown = {key: value for key, value in row.items() if key != "samples"}
    print(json.dumps(shown, indent=2))
    return 0 if row["slope_bytes_per_hour"] < MAX_SLOPE_BYTES and row["adds_up"] else 1


if __name__ == "__main__":
    sys.exit(main())
