"""Times `gemel inspect` on workloads of 100 to 1,000 queries, each in a process of its own.

Usage: python -m benchmarks.bundles.inspection [--queries 100 250 500 1000]

The queries go round the whole zoo, with 2 to 12 classes, at their published input sizes. Prints one JSON object:
seconds, peak resident memory, and `growth`, seconds per query over those of the smallest workload (1.0 is linear
growth; the description of each architecture, done once, makes it less).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml


def main() -> None:
    """Run all measurements and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=int, nargs="+", default=[100, 250, 500, 1000])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = [measure(Path(folder), count) for count in sorted(options.queries)]
    least = rows[0]["seconds"] / rows[0]["queries"]
    for row in rows:
        row["growth"] = row["seconds"] / row["queries"] / least
    print(json.dumps({"machine": f"{os.cpu_count()} x {platform.machine()}", "rows": rows}, indent=2))


def measure(folder: Path, count: int) -> dict[str, Any]:
    """Seconds and peak memory of one `gemel inspect --json`, start of the process included."""
    path = folder / f"{count}.yaml"
    path.write_text(yaml.safe_dump(workload(count)))
    command = [sys.executable, "-m", "gemel", "inspect", str(path), "--json"]
    started = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    found = json.load(process.stdout)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"gemel inspect ended with status {status}")
    assert isinstance(usage, resource.struct_rusage) and len(found["queries"]) == count
    return {
        "queries": count,
        "seconds": time.monotonic() - started,
        "peak_bytes": usage.ru_maxrss * 1024,
        "models": len({query["model"] for query in found["queries"]}),
        "groups": len(found["groups"]),
        "ceiling_fraction": found["ceiling_fraction"],
    }


def workload(count: int) -> dict[str, Any]:
    """A workload file of so many queries over the whole zoo."""
    from gemel.models.zoo.registry import ENTRIES

    entries = sorted(ENTRIES.values(), key=lambda entry: entry.name)
    queries = []
    for index in range(count):
        entry = entries[index % len(entries)]
        classes = [f"class{number}" for number in range(2 + index % 11)]
        queries.append({
            "id": f"q{index}", "camera": f"c{index % 50}", "task": entry.task, "classes": classes,
            "model": entry.name, "input_size": entry.input_size,
        })  # fmt: skip
    return {"name": "many", "cameras": {f"c{n}": {"source": f"clips/{n}.mp4"} for n in range(50)}, "queries": queries}


if __name__ == "__main__":
    main()
