"""Frames in time with a quarter of the memory that all networks need: merged against unmerged.

    OMP_NUM_THREADS=1 python -m benchmarks.serving.quarter VIDEO resnet18:224:4 resnet34:224:4 resnet50:224:4

Each NAME:SIDE:COUNT is networks of the catalogue of one architecture. Two bundles hold the same networks: `unmerged`,
where each has weights of its own, and `merged`, where those of one architecture share all but norms and heads. All
queries are of one camera, which plays VIDEO at `--fps`. Both are served by `gemel run` in turns with `memory`, for the
whole process, at `--part` of what `gemel plan` says that the unmerged need in all, from mapped files on this machine's
disk. A frame is in time where its result is not late; `bytes_moved` are read from the file into memory.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import yaml

from benchmarks.engines.mapped import make_bundle
from benchmarks.machine import machine
from benchmarks.serving.own_work import processor_s

ARMS = {"unmerged": True, "merged": False}
PORT, SETTLE_S, START_S, TURNS = 8497, 20.0, 300.0, 2


def gemel(*arguments: str) -> str:
    """What a command prints."""
    return subprocess.run(
        [sys.executable, "-m", "gemel", *arguments], check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def read_status() -> dict[str, Any]:
    """The status of the box."""
    with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/api/status") as answer:
        return json.load(answer)


def counts(status: dict[str, Any]) -> dict[str, int]:
    """Frames received, in time, and bytes read since the box began."""
    ledgers = [query["ledger"] for query in status["queries"]]
    return {
        "received": sum(ledger["received"] for ledger in ledgers),
        "in_time": sum(ledger["processed"] - ledger["late"] for ledger in ledgers),
        "bytes_moved": status["bytes_moved"],
    }


def serve(config: Path, seconds: float) -> dict[str, Any]:
    """Run a box for so many seconds after it has settled: counts of frames and its processor time."""
    command = [sys.executable, "-m", "gemel", "run", str(config)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        ends = time.monotonic() + START_S
        while process.poll() is None and time.monotonic() < ends:
            time.sleep(0.5)
            try:
                if all(query["ledger"]["processed"] for query in read_status()["queries"]):
                    break
            except OSError:
                continue
        time.sleep(SETTLE_S)
        before, processor = counts(read_status()), processor_s(process.pid)
        time.sleep(seconds)
        after, processor = counts(read_status()), processor_s(process.pid) - processor
        process.send_signal(signal.SIGTERM)
    frames = {key: after[key] - value for key, value in before.items()}
    return {
        **frames,
        "in_time_part": round(frames["in_time"] / frames["received"], 4),
        "processor_s": round(processor, 2),
    }


def main() -> None:
    """Measure both arms in turns and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("video", type=Path)
    parser.add_argument("families", nargs="+", metavar="NAME:SIDE:COUNT")
    parser.add_argument("--fps", type=float, default=2.0)
    parser.add_argument("--sla-ms", type=float, default=1000.0)
    parser.add_argument("--part", type=float, default=0.25)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    families = [(name, int(side), int(count)) for name, side, count in (text.split(":") for text in options.families)]
    with tempfile.TemporaryDirectory(prefix="gemel-", dir=os.environ.get("TMPDIR")) as name:
        folder = Path(name)
        for arm, is_apart in ARMS.items():
            path = folder / f"{arm}.safetensors"
            make_bundle(path, families, is_apart, fps=options.fps, sla_ms=options.sla_ms)
            gemel("prepare", str(path))
        plan = json.loads(gemel("plan", str(folder / "unmerged.safetensors"), "--json"))
        memory = int(options.part * plan["all_bytes"])
        configs = {}
        for arm in ARMS:
            configs[arm] = folder / f"{arm}.yaml"
            camera = {"source": str(options.video.resolve()), "fps": options.fps, "loop": True}
            configs[arm].write_text(yaml.safe_dump({
                "bundle": f"{arm}.safetensors", "memory": memory, "cameras": {"one": camera},
                "http": {"bind": f"127.0.0.1:{PORT}"}, "sinks": [{"kind": "jsonl", "path": f"{arm}.jsonl"}],
            }))  # fmt: skip
        turns = [{arm: serve(configs[arm], options.seconds) for arm in ARMS} for _ in range(TURNS)]
    frames = {arm: sum(turn[arm]["in_time"] for turn in turns) for arm in ARMS}
    report = {
        "machine": machine(), "families": options.families, "needed_bytes": plan["all_bytes"], "memory_bytes": memory,
        "turns": turns, "merged_over_unmerged": round(frames["merged"] / frames["unmerged"], 3),
    }  # fmt: skip
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
