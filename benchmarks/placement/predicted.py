"""How near `--shared predicted` comes to what merges saved: every recorded merge at 95 % of the method `top-down`.

Usage: python -m benchmarks.placement.predicted

Reads the cells of benchmarks/measured; nothing is run. A row for each record: bytes saved as predicted and as measured,
both as a part of the ceiling.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import yaml

from benchmarks.merging.cells import read_cells
from gemel.fleet import load_fleet, measure_needs
from gemel.text import table

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("merge", "merge-avx2", "unseen/first", "unseen/later")


def main() -> None:
    """Print a row for each record."""
    rows, known = [], dict[str, float]()
    for folder in FOLDERS:
        for cell in sorted(read_cells(ROOT / "measured" / folder), key=lambda one: (one.workload, one.seed)):
            if cell.arm != "top-down" or cell.target != 0.95:
                continue
            workload = cell.workload
            if workload not in known:
                known[workload] = predicted_of_ceiling(ROOT / "workloads" / f"{workload}.yaml")
            saved = cell.result["saved_fraction"] / cell.result["ceiling_fraction"]
            rows.append((folder, workload, cell.seed, f"{known[workload]:.3f}", f"{saved:.3f}"))
    print(table(("records", "workload", "seed", "predicted / ceiling", "saved / ceiling"), rows))


def predicted_of_ceiling(workload: Path) -> float:
    """What a workload's merge is predicted to save, as a part of the ceiling."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fleet.yaml"
        boxes = [{"id": "box", "device": "jetson-nano", "memory": "64GiB"}]
        path.write_text(yaml.safe_dump({"name": "one", "boxes": boxes, "workloads": [str(workload)]}))
        fleet = load_fleet(path)
        apart, predicted, ceiling = (
            demands.weight_bytes(demands.total)
            for shared in ("none", "predicted", "ceiling")
            for demands in [measure_needs(fleet, shared, timed=False).demands]
        )
    return (apart - predicted) / (apart - ceiling)


if __name__ == "__main__":
    main()
