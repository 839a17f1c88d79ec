"""Bytes, layer-sharing bound and heaviest layers of the fifteen catalogue workloads, without weights or footage.

Usage: python -m benchmarks.catalogue --json FILE
"""

from __future__ import annotations

import argparse
import datetime
import json
from pathlib import Path
from typing import Any

from benchmarks.schedule.cases import catalogue
from gemel.inspection import inspect_workload
from gemel.models.files.io import open_atomic
from gemel.models.sharing.layers import layers_of_all
from gemel.models.workload import load_workload


def weigh_workload(path: Path) -> dict[str, Any]:
    """Bytes and layer-sharing bound of a workload; `half_in` = the fewest layers with half of the bytes."""
    workload = load_workload(path)
    found = inspect_workload(workload)
    sizes = sorted((layer.bytes for layer in layers_of_all(workload.queries)), reverse=True)
    held, count = 0, 0
    while 2 * held < sum(sizes):
        held, count = held + sizes[count], count + 1
    return {
        "workload": path.stem,
        "queries": len(found.queries),
        "bytes": found.total_bytes,
        "ceiling_fraction": round(found.ceiling_fraction, 4),
        "layers": len(sizes),
        "half_in": count,
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    out = parser.parse_args().json
    record = {"catalogue": list(map(weigh_workload, catalogue())), "date": datetime.date.today().isoformat()}
    with open_atomic(out, overwrite=True) as file:
        file.write(json.dumps(record, indent=2).encode() + b"\n")


if __name__ == "__main__":
    main()
