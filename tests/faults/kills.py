"""A box that is killed at any moment, and started again."""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections import Counter
from pathlib import Path

from tests.edge_runtime.running import Running, adds_up
from tests.edge_runtime.tiny import write_clip
from tests.faults.queries import FACTORIES, one_each
from tests.faults.scenario import Found, Tell

CAMERAS, MAX_BYTES = 4, 40_000
MAX_LIFE_S, MAX_START_S = 3.0, 10.0
EARLY_SHARE = 0.2
"""So many of the kills come while the box still starts."""


def kills(folder: Path, times: int, tell: Tell) -> Found:
    """kill -9, and `gemel run` again, on the same files."""
    names = [f"c{index}" for index in range(CAMERAS)]
    one_each(folder, names)
    write_clip(folder / "c.mp4", 30, 25)
    chance, starts, cpu_s, torn = random.Random(0), list[float](), list[float](), 0
    sinks = [
        {"kind": "jsonl", "path": "results.jsonl"},
        {"kind": "jsonl", "path": "turned.jsonl", "max_bytes": MAX_BYTES, "keep": 1000},
    ]
    cameras = {name: {"source": "c.mp4", "loop": True} for name in names}
    found = Found()
    for index in range(times + 1):
        with Running(folder, cameras=cameras, factories=FACTORIES, sinks=sinks) as box:
            early = index < times and chance.random() < EARLY_SHARE
            if early:
                time.sleep(chance.uniform(0, MAX_START_S / 4))
            else:
                begun = time.time()
                box.until(lambda begun=begun: _newest(folder) > begun)
                starts.append(time.monotonic() - box.began)
                cpu_s.append(box.cpu_s())
                time.sleep(chance.uniform(0, MAX_LIFE_S))
            if index == times:
                ended = box.stop()
            else:
                box.kill()
        torn += _torn(folder / "results.jsonl")
        with contextlib.suppress(FileNotFoundError):
            box.ledger()
        tell(f"{index} of {times} kills" if early else f"{index} of {times} kills; serving after {starts[-1]:.1f} s")
    records = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    turned = [
        json.loads(line) for path in folder.glob("turned.jsonl*") for line in path.read_text().splitlines() if line
    ]
    twice = [
        key
        for kept in (records, turned)
        for key, count in Counter((one["run"], one["query"], one["frame"]) for one in kept).items()
        if count > 1
    ]
    runs = {one["run"] for one in records}
    found.said = (
        f"{times} kills: {len(records):,} results of {len(runs)} runs, no (run, query, frame) twice; a line was cut "
        f"short {torn} times and mended; serving again {sum(starts) / len(starts):.1f} s after a start on average, "
        f"{max(starts):.1f} s at most, {sum(cpu_s) / len(cpu_s):.1f} s of CPU time"
    )
    found.figures = {
        "results": len(records), "runs": len(runs), "torn": torn, "twice": len(twice),
        "start_s_mean": round(sum(starts) / len(starts), 2), "start_s_max": round(max(starts), 2),
        "start_cpu_s_mean": round(sum(cpu_s) / len(cpu_s), 2),
    }  # fmt: skip
    found.hold(not twice, f"{len(twice)} keys twice, as {twice[:1]}")
    found.hold(ended == 0 and adds_up(box.ledger()), "the ledger does not add up")
    found.hold(len(runs) >= len(starts), "two runs had one id")
    found.hold(not list(folder.rglob("*.tmp*")), "something half-written was left")
    found.in_time(max(starts) <= MAX_START_S, f"it served only after {max(starts):.1f} s")
    return found


def _newest(folder: Path) -> float:
    """When the newest whole record was captured."""
    path = folder / "results.jsonl"
    if not path.exists():
        return 0.0
    with open(path, "rb") as file:
        file.seek(max(0, file.seek(0, 2) - 4096))
        lines = file.read().split(b"\n")[1:-1]
    return json.loads(lines[-1])["captured_at"] if lines else 0.0


def _torn(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
