"""Prepares a real workload: `python -m benchmarks.data.prepare NAME [--data DIR] [--out DIR]`.

NAME is ancestor, boxes, cifar, domains, door, elsewhere, gti, junction, kinds, kiosk, london, published, questions,
shop, simple or streets.

Reads the data folder, which is no part of this project, and writes OUT/workload.yaml with everything that it
names: labelled frames under OUT/data, the clips that the box plays under OUT/clips, starting weights under
OUT/init. What is complete is skipped, so it can be interrupted and run again.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.data import cifar as prepare_cifar
from benchmarks.data import domains as prepare_domains
from benchmarks.data import elsewhere as prepare_elsewhere
from benchmarks.data import gti as prepare_gti
from benchmarks.data import junction as prepare_junction
from benchmarks.data import london as prepare_london
from benchmarks.data import public, unseen
from benchmarks.data import published as prepare_published
from benchmarks.data import questions as prepare_questions
from benchmarks.data import simple as prepare_simple
from benchmarks.data import streets as prepare_streets
from benchmarks.data.files import DATA_LICENCES, PrepareError, copy_whole, data_folder, say

REPOSITORY = Path(__file__).resolve().parents[2]
WORKLOADS = {
    "ancestor": unseen.prepare_ancestor,
    "boxes": unseen.prepare_boxes,
    "cifar": prepare_cifar.prepare,
    "domains": prepare_domains.prepare,
    "door": public.prepare_door,
    "elsewhere": prepare_elsewhere.prepare,
    "gti": prepare_gti.prepare,
    "junction": prepare_junction.prepare,
    "kinds": unseen.prepare_kinds,
    "kiosk": public.prepare_kiosk,
    "london": prepare_london.prepare,
    "published": prepare_published.prepare,
    "questions": prepare_questions.prepare,
    "shop": public.prepare_shop,
    "simple": prepare_simple.prepare,
    "streets": prepare_streets.prepare,
}


def prepare(name: str, data: Path, out: Path) -> dict[str, Any]:
    """Prepare one workload into `out`; returns the counts of every query, split and class."""
    say(f"{name}: {data} -> {out}")
    counts = WORKLOADS[name](data, out)
    (out / "counts.json").write_text(json.dumps(counts, indent=1) + "\n", encoding="utf-8")
    (out / "LICENCES.txt").write_text(DATA_LICENCES + "\n", encoding="utf-8")
    workload = out / "workload.yaml"
    workload.unlink(missing_ok=True)  # written last and always: a workload.yaml means that all of it is there
    copy_whole(REPOSITORY / "benchmarks" / "workloads" / f"{name}.yaml", workload)
    say(f"{name}: ready, {workload}")
    return counts


def main(arguments: list[str] | None = None) -> int:
    """The command; exit code 2 with one line on stderr when the data is not there."""
    parser = argparse.ArgumentParser(description="Prepares a real workload from the data folder.")
    parser.add_argument("name", choices=sorted(WORKLOADS))
    parser.add_argument("--data", help="folder with MANIFEST.json (default: GEMEL_DATA, else ../shared/data)")
    parser.add_argument("--out", help="where to write (default: out/real/NAME)")
    parser.add_argument("--json", action="store_true", help="print the counts as one JSON object")
    given = parser.parse_args(arguments)
    out = Path(given.out) if given.out else REPOSITORY / "out" / "real" / given.name
    try:
        counts = prepare(given.name, data_folder(given.data, REPOSITORY), out)
    except PrepareError as error:
        say(f"error: {error}")
        return 2
    except OSError as error:
        say(f"error: {error.filename}: {error.strerror}; give another --out or free some space")
        return 2
    except KeyboardInterrupt:
        say("interrupted; run it again to go on")
        return 130
    if given.json:
        print(json.dumps(counts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
