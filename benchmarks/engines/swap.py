"""Times what it takes to make a query resident, as a ratio to a plain copy of the same bytes in the same run.

Usage: python -m benchmarks.engines.swap [BUNDLE ...] [--rounds N] [--json FILE]

Per query: a cold swap (nothing of it resident: evict, copy, bind the engine) against one copy of as many bytes from
the mapped bundle into memory of the same kind by one thread; the same with the weights of convolutions put in
channels-last order on arrival, as for an engine that takes them in no other; the swap from the
query before it in the bundle, where only what is missing moves; and rebinding while everything is resident. All are
measured in turn, round by round; medians. Where the machine does other things too, the ratios of processor times and of
the best rounds say more than the wall's. Without a bundle, one of two ResNet-50 and two ResNet-18 with random weights
is made, each pair sharing all but the last layer. "Device memory" on a CPU is RAM, so these figures say what the
bookkeeping costs, not what a bus does.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterable
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.bundles.samples import CLASSES, INPUT_SIZE, bundle_query, write_measured_bundle
from benchmarks.machine import machine
from gemel.edge_runtime.engines.torch_engine import TorchEngine
from gemel.edge_runtime.memory.allocator import Extent, FreeList
from gemel.edge_runtime.memory.arena import Arena
from gemel.edge_runtime.memory.store import Store, channels_last_layouts
from gemel.edge_runtime.memory.transfer_cpu import allocate_memory
from gemel.models import zoo
from gemel.models.bundle import Bundle, open_bundle

MODELS = {"first": "resnet50", "second": "resnet50", "third": "resnet18", "fourth": "resnet18"}
COLUMNS = (
    "query",
    "model",
    "megabytes",
    "copies",
    "plain_ms",
    "cold_ms",
    "ratio",
    "cpu_ratio",
    "best_ratio",
    "arranged_ms",
    "arranged_ratio",
    "from_previous_megabytes",
    "from_previous_ms",
    "rebind_ms",
)


def main() -> None:
    """Measure every bundle; print a table each and one JSON object in the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", nargs="*", type=Path)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--json", type=Path, help="also write the JSON here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        paths = options.bundles or [made_bundle(Path(folder) / "random.gemel")]
        report = {
            "date": date.today().isoformat(),
            "machine": {**machine(), "device": "cpu"},
            "rounds": options.rounds,
            "bundles": [measure(open_bundle(path), options.rounds) for path in paths],
        }
    for bundle in report["bundles"]:
        show(bundle)
    text = json.dumps(report, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text)


def made_bundle(path: Path) -> Path:
    """Two pairs of queries; each pair shares all but its heads."""
    torch.manual_seed(0)
    models = {name: zoo.build(model, CLASSES, {}, INPUT_SIZE) for name, model in MODELS.items()}
    for kept, tied in (("first", "second"), ("third", "fourth")):
        state = {key: tensor for key, tensor in models[kept].state_dict().items() if not key.startswith("fc.")}
        models[tied].load_state_dict({**models[tied].state_dict(), **state}, assign=True)
    return write_measured_bundle(path, models, [bundle_query(name, model) for name, model in MODELS.items()]).path


def measure(bundle: Bundle, rounds: int) -> dict[str, Any]:
    """Every figure of one bundle, in an arena with room for the two largest queries."""
    store = Store.of_bundle(bundle)
    engines = {query.id: TorchEngine(bundle, query.id) for query in bundle.queries}
    needs = {query: bundle.names_in_order(query) for query in engines}
    needed = {query: frozenset(names) for query, names in needs.items()}
    largest = sorted(
        sum(store.extents[name].end - store.extents[name].offset for name in names) for names in needs.values()
    )[-2:]
    arena = Arena(store, sum(largest))
    arranging = Arena(store, sum(largest), layouts=channels_last_layouts(store.kinds))
    arranged = {query.id: TorchEngine(bundle, query.id) for query in bundle.queries}
    _, plain_memory = allocate_memory(max(largest))
    previous = dict(zip(needs, [list(needs)[-1], *needs]))
    taken: dict[tuple[str, str], list[float]] = {}
    cpu: dict[tuple[str, str], list[float]] = {}
    moved: dict[str, int] = {}

    def time_swaps(query: str, what: str, action: Callable[[], object]) -> None:
        started, busy = time.perf_counter(), time.process_time()
        action()
        cpu.setdefault((query, what), []).append(1000 * (time.process_time() - busy))
        taken.setdefault((query, what), []).append(1000 * (time.perf_counter() - started))

    def swap(query: str) -> None:
        arena.start(needs[query], 0, arena.residency.resident - needed[query], waits=True)
        arena.bind(engines[query], needs[query])

    def swap_and_arrange(query: str) -> None:
        arranging.start(needs[query], 0, waits=True)
        arranging.bind(arranged[query], needs[query])

    for _ in range(rounds):
        for query, names in needs.items():
            nbytes = sum(store.extents[name].nbytes for name in names)
            start = store.extents[names[0]].offset
            source = store.data[start : start + nbytes] if start + nbytes <= store.data.size else store.data[-nbytes:]
            time_swaps(query, "plain", lambda source=source: np.copyto(plain_memory[: source.size], source))
            arena.change(arena.residency.resident, ())
            time_swaps(query, "cold", lambda query=query: swap(query))
            arranging.change(arranging.residency.resident, ())
            time_swaps(query, "arranged", lambda query=query: swap_and_arrange(query))
            time_swaps(query, "rebind", lambda query=query: swap(query))
            swap(previous[query])
            before = arena.bytes_moved
            time_swaps(query, "from_previous", lambda query=query: swap(query))
            moved[query] = arena.bytes_moved - before
    arena.close()
    arranging.close()
    rows = []
    for query in bundle.queries:
        timings = ("plain", "cold", "arranged", "from_previous", "rebind")
        found = {what: median(taken[query.id, what]) for what in timings}
        nbytes = sum(store.extents[name].nbytes for name in needs[query.id])
        pairs = zip(taken[query.id, "cold"], taken[query.id, "plain"])
        rows.append(
            {
                "query": query.id,
                "model": query.model,
                "megabytes": nbytes / 1e6,
                "copies": runs(store.extents[name] for name in needs[query.id]),
                **{f"{what}_ms": value for what, value in found.items()},
                "ratio": found["cold"] / found["plain"],
                "ratio_by_round": median(a / b for a, b in pairs),
                "arranged_ratio": found["arranged"] / found["plain"],
                "cpu_ratio": median(cpu[query.id, "cold"]) / median(cpu[query.id, "plain"]),
                "best_ratio": min(taken[query.id, "cold"]) / min(taken[query.id, "plain"]),
                "from_previous_megabytes": moved[query.id] / 1e6,
            }
        )
    return {"bundle": bundle.path.name, "digest": bundle.digest[:12], "queries": rows}


def runs(extents: Iterable[Extent]) -> int:
    """How many stretches of the bundle a query's tensors lie in."""
    spans = FreeList()
    spans.add((extent.offset, extent.end) for extent in extents)
    return len(spans.spans)


def show(bundle: dict[str, Any]) -> None:
    """One table of a bundle's queries."""
    print(f"\n{bundle['bundle']} ({bundle['digest']})")
    print("  ".join(f"{column:>{max(14, len(column))}}" for column in COLUMNS))
    for row in bundle["queries"]:
        cells = [f"{row[column]:.3f}" if isinstance(row[column], float) else str(row[column]) for column in COLUMNS]
        print("  ".join(f"{cell:>{max(14, len(column))}}" for cell, column in zip(cells, COLUMNS)))


if __name__ == "__main__":
    main()
