"""Boxes that a city's queries need with sharing and without: the workloads of this folder's neighbour, some times over.

Usage: python -m benchmarks.placement.city [--times 1 3] [--memory 512MiB] [--device jetson-nano]
       [--min-frames 0] [--seconds 60]

Every workload of benchmarks/workloads stands for one place, `--times` is how many such places of each there are; ids
and cameras are numbered. Queries that fit in no box are left out everywhere. Prints a row for each number of places and
kind of sharing: boxes, the bound, the gap, seconds, and the boxes over those without sharing.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from benchmarks.machine import machine
from gemel.conditions import PlacementOptions
from gemel.fleet import load_fleet
from gemel.placement import find_placement
from gemel.text import percent, table

WORKLOADS = Path(__file__).resolve().parents[1] / "workloads"


def main() -> None:
    """Place every city, and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--memory", default="512MiB")
    parser.add_argument("--device", default="jetson-nano")
    parser.add_argument("--min-frames", type=float, default=0.0)
    parser.add_argument("--seconds", type=float, default=60.0)
    given = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for times in given.times:
            path, count = city(Path(folder), times, {"device": given.device, "memory": given.memory})
            apart = 0
            for shared in ("none", "predicted", "ceiling"):
                asked = PlacementOptions("boxes", shared, given.min_frames, seconds=given.seconds)
                found = find_placement(load_fleet(path), asked)
                apart = apart or len(found.boxes)
                rows.append((
                    count - len(found.unplaced), shared, len(found.boxes), f"{found.bound:g}", percent(found.gap),
                    f"{found.seconds:.0f} s", f"{len(found.boxes) / apart:.2f}",
                ))  # fmt: skip
                print(rows[-1], file=sys.stderr, flush=True)
    print(table(("queries", "sharing", "boxes", "bound", "gap", "took", "of none"), rows))
    print(f"\n{given.memory} on each {given.device}; {machine()}")


def places() -> list[Path]:
    """The workloads of models by name; a model's file need not be there yet."""
    return [path for path in sorted(WORKLOADS.glob("*.yaml")) if ".onnx" not in path.read_text(encoding="utf-8")]


def city(folder: Path, times: int, box: dict[str, Any]) -> tuple[Path, int]:
    """A fleet file with so many places of every workload, boxes enough for all, and how many queries there are."""
    names, count = list[str](), 0
    for path in places():
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
        for number in range(times):
            place = f"{path.stem}-{number}"
            queries = [
                {**query, "id": f"{place}-{query['id']}", "camera": f"{place}-{query['camera']}"}
                for query in document["queries"]
            ]
            cameras = {f"{place}-{name}": camera for name, camera in document["cameras"].items()}
            (folder / f"{place}.yaml").write_text(yaml.safe_dump({**document, "cameras": cameras, "queries": queries}))
            names.append(f"{place}.yaml")
            count += len(queries)
    path = folder / f"city-{times}.yaml"
    boxes = [{"id": "box", "count": count, **box}]
    path.write_text(yaml.safe_dump({"name": "city", "boxes": boxes, "workloads": names}))
    return path, count


if __name__ == "__main__":
    main()
