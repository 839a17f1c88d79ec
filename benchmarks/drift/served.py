"""Shows what a drift check is for: a merged bundle serves its own clips, then cameras that it never saw.

Usage: python -m benchmarks.drift.served --demo DIR --out DIR [--data DIR --seconds 20]

`--demo` is what `gemel demo --out DIR` left: rendered cameras by day and by night, originals, a bundle. The real box
plays each scene: the cameras as they were, day and night exchanged, and with `--data` (the footage of the real
workloads) streets of London by day and by night in their place. After each one `gemel drift check` judges what the box
answered. What it reverts is run again on the same scene and judged again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from benchmarks.machine import machine
from gemel.drift import check_drift
from gemel.edge_runtime.life import daemon
from gemel.models.bundle.delta import write_update

BUNDLE, WORKLOAD = "sample.safetensors", "workload.yaml"
DAY, NIGHT, SQUARE = "junction-day", "junction-night", "square"
LONDON = "videos/tfl_a13_625"
LONDON_DAY, LONDON_NIGHT = f"{LONDON}/625_201708101101.mp4", f"{LONDON}/625_201709042122.mp4"


def main() -> None:
    """Run it and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    demo, out = options.demo.resolve(), options.out.resolve()
    rows = []
    for name, cameras in scenes(demo, options.data):
        rows += measure_drift(demo, out / name, cameras, options.seconds)
    print(json.dumps({"machine": machine(), "rows": rows}, indent=2))


def scenes(demo: Path, data: Path | None) -> Iterator[tuple[str, dict[str, Path]]]:
    """What each camera shows, by the name of the scene."""
    own = {camera: demo / "clips" / f"{camera}.mp4" for camera in (DAY, NIGHT, SQUARE)}
    yield "as-merged", own
    yield "exchanged", {**own, DAY: own[NIGHT], NIGHT: own[DAY]}
    if data is not None:
        yield "london-day", {**own, DAY: data / LONDON_DAY, NIGHT: data / LONDON_DAY}
        yield "london-night", {**own, DAY: data / LONDON_NIGHT, NIGHT: data / LONDON_NIGHT}


def measure_drift(demo: Path, folder: Path, cameras: Mapping[str, Path], seconds: float) -> Iterator[dict[str, Any]]:
    """What the check says of the merged bundle on these cameras, and of the reverted one if it reverted any."""
    folder.mkdir(parents=True)
    merged, reverted = demo / BUNDLE, folder / "reverted.safetensors"
    spool = serve_clips(folder / "spool", merged, cameras, seconds)
    found = check_drift(spool, demo / WORKLOAD, reverted).to_json()
    yield from of_queries(found, folder.name, "merged")
    if found["out"] is not None:
        again = check_drift(serve_clips(folder / "again", reverted, cameras, seconds), demo / WORKLOAD).to_json()
        shipped = write_update(merged, reverted, None)
        yield from of_queries(again, folder.name, "reverted", update_bytes=shipped.bytes, bytes=shipped.bundle_bytes)


def serve_clips(spool: Path, bundle: Path, cameras: Mapping[str, Path], seconds: float) -> Path:
    """The spool that a box leaves which runs the bundle for so long, every answer sampled."""
    config = {
        "bundle": str(bundle), "budget": "512MiB", "engine": "torch", "device": "cpu",
        "cameras": {name: {"source": str(source), "fps": 5, "loop": True} for name, source in cameras.items()},
        "sinks": [{"kind": "jsonl", "path": "/dev/null"}], "spool": {"path": str(spool), "every_s": 0.01},
    }  # fmt: skip
    path = spool.with_name(f"{spool.name}.yaml")
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    daemon.run(path, seconds=seconds)
    return spool


def of_queries(found: Mapping[str, Any], scene: str, bundle: str, **more: int) -> Iterator[dict[str, Any]]:
    """A row for each query."""
    keys = ("id", "metric", "frames", "ratio", "target", "verdict", "reverted")
    for row in found["queries"]:
        yield {"scene": scene, "bundle": bundle, **{key: row[key] for key in keys}, **more}


if __name__ == "__main__":
    main()
