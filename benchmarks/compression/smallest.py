"""The bytes of a workload in the fewest bits that its queries bear, merged and not merged.

Usage: python -m benchmarks.compression.smallest WORKLOAD.yaml --json FILE [--bundle MERGED] [--weights int4]

The arm `none` are the originals, the arm of a bundle (made in float32, as `python -m benchmarks.merging.merge --keep`
leaves it) is what was merged. Both go through the same search for widths as `gemel merge --weights` (what each query
must keep is judged on val), are written as bundles and judged on test. FILE keeps an arm as soon as it is there, and
what is there is not done again; an interrupted search goes on where it was (`FILE.ARM.work`). A merge in which all got
their originals back has the figures of `none`. The claim of merging: at most 1.05 x (1 - the ceiling) of the bytes of
`none`, with every query at its target on test in both.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from benchmarks.data.files import say
from benchmarks.machine import machine
from gemel.progress import show_progress
from merger import MergeOptions
from merger.checkpoint import WORK_SUFFIX, Checkpoint, snapshot
from merger.core.budget import Budget
from merger.core.context import MergeContext
from merger.core.merged import Merged
from merger.events import Progress
from merger.widths.search import fit_widths
from merger.widths.storing import Storage, store, tied_models
from models.bits import BIT_WIDTHS
from models.bundle import BundleQuery, Made, write_bundle
from models.bundle.reader import open_bundle
from models.errors import InputError
from models.io import open_atomic
from models.sharing.groups import ceiling_bytes
from models.sharing.layers import model_bytes, weight_key
from models.sharing.plan import SharingPlan
from models.weights import fingerprint
from models.workload import load_workload
from models.zoo import is_zoo_name

NONE = "none"
SLACK = 1.05
HEADS = (
    "workload",
    "ceiling",
    "originals, MB",
    "`none`, MB",
    "met",
    "merged, MB",
    "met",
    "merged / `none`",
    "claimed: at most",
    "holds",
)
TOGETHER = ("arm", "models", "bytes, MB", "of the largest in float32", "met on test", "worst ratio")
WORKLOADS = Path(__file__).resolve().parents[1] / "workloads"


def merged_of(ctx: MergeContext, path: Path) -> tuple[str, Merged]:
    """The method of a bundle, and what it holds: the sets of layers that share a tensor, and every query's weights."""
    factories = [query.model for query in ctx.queries.values() if not is_zoo_name(query.model)]
    bundle = open_bundle(path, factories, ctx.workload.path.parent)
    if {query.id for query in bundle.queries} != set(ctx.queries):
        raise InputError(path, f"is no bundle of {ctx.workload.path}", "give the workload it was made of")
    states = {query: snapshot(bundle.build(query)) for query in ctx.queries}
    named = {query.id: query.tensors for query in bundle.queries}
    sets: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for layer in ctx.layers:
        own = named[layer.query]
        sets[own[weight_key(own, layer.path)]].append((layer.query, layer.path))
    return bundle.manifest.method, Merged(SharingPlan(tuple(map(tuple, filter(_several, sets.values())))), states)


def merged_nothing(merged: Merged, originals: Merged) -> bool:
    """Whether nothing is shared and every weight is the original's, as where all queries left the merge."""
    pairs = [(own, originals.states[query]) for query, own in merged.states.items()]
    return not merged.plan.shared and all(torch.equal(one[key], other[key]) for one, other in pairs for key in other)


def _several(members: Sequence[Any]) -> bool:
    return len(members) > 1


def smallest(ctx: MergeContext, merged: Merged, weights: Any, checkpoint: Checkpoint) -> dict[str, Any]:
    """What is merged in the fewest bits: its bytes, the bytes by width, and every query on test."""
    started = time.monotonic() - checkpoint.seconds
    checkpoint.meter = ctx.flops
    required = MergeOptions().required(ctx)
    found = fit_widths(ctx, merged, weights, required, checkpoint, Budget(ctx.flops))
    merged = Merged(merged.plan.without(*found["left"]), {**merged.states, **found["states"]})
    models = tied_models(ctx, merged, ctx.queries)
    stored = store(models, Storage(**found["storage"]))
    evidence = {query: ctx.evidence(query, model) for query, model in models.items()}
    records = [BundleQuery.of(query, evidence[query.id].to_json()) for query in ctx.workload.queries]
    with tempfile.TemporaryDirectory() as folder:
        made = Made(ctx.workload.name, NONE, 0)
        counts = write_bundle(Path(folder) / "smallest.safetensors", models, records, made, packed=stored).bytes
    return {
        "before_bytes": counts.before,
        "bytes": counts.after,
        "stored_bytes": found["stored_bytes"],
        "rounds": len(found["rows"]),
        "trained": sorted(found["states"].keys() - found["left"]),
        "left": found["left"],
        "seconds": round(time.monotonic() - started, 1),
        "queries": [{"id": query, **one.to_json()} for query, one in evidence.items()],
    }


def rows(kept: Sequence[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
    """A row of HEADS for each workload, from what was kept of it."""
    found = []
    for one in kept:
        arms, limit = one["arms"], SLACK * (1 - one["ceiling_fraction"])
        none, others = arms[NONE], [arm for name, arm in arms.items() if name != NONE]
        row = [one["workload"], one["ceiling_fraction"], _mb(none["before_bytes"]), _mb(none["bytes"]), _met(none)]
        if not others:
            found.append((*row, "-", "-", "-", limit, "-"))
        for arm in others:
            ratio = arm["bytes"] / none["bytes"]
            every = all(query["met"] for side in (none, arm) for query in side["queries"])
            holds = "yes" if ratio <= limit and every else "no" if every else "no: a query is below its target"
            found.append((*row, _mb(arm["bytes"]), _met(arm), ratio, limit, holds))
    return found


def together(kept: Sequence[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
    """A row of TOGETHER for each arm: all models of these workloads, beside the largest single one in float32."""
    largest = max(
        model_bytes(query) for one in kept for query in load_workload(WORKLOADS / f"{one['workload']}.yaml").queries
    )
    found = []
    for said, chosen in (
        (f"`{NONE}`", [one["arms"][NONE] for one in kept]),
        ("merged", [_merged(one) for one in kept]),
    ):
        queries = [query for arm in chosen for query in arm["queries"]]
        total = sum(arm["bytes"] for arm in chosen)
        worst = min(queries, key=lambda query: query["ratio"])
        met = f"{sum(query['met'] for query in queries)} of {len(queries)}"
        found.append((said, len(queries), _mb(total), total / largest, met, f"{worst['ratio']:.3f} ({worst['id']})"))
    return found


def _merged(one: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arm of what was merged; that of the originals where nothing was."""
    return next((arm for name, arm in one["arms"].items() if name != NONE), one["arms"][NONE])


def _mb(count: int) -> str:
    return f"{count / 1e6:.2f}"


def _met(arm: Mapping[str, Any]) -> str:
    return f"{sum(query['met'] for query in arm['queries'])} of {len(arm['queries'])}"


def measured(workload: Path, bundle: Path | None, weights: str, kept: Path, progress: Progress) -> dict[str, Any]:
    """What `kept` holds of this workload, with the arms that were missing measured and kept."""
    ctx = MergeContext(load_workload(workload), progress=progress)
    ctx.interval = MergeOptions().margin is None
    asked: dict[str, Any] = {"workload": ctx.workload.name, "weights": weights}
    found: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8")) if kept.is_file() else {}
    if found and {key: found[key] for key in asked} != asked:
        raise InputError(kept, f"was measured of {found['workload']} in {found['weights']}", "give another --json")
    sizes = sum(sum(t.nbytes for t in model.state_dict().values()) for model in ctx.originals.values())
    empty = Merged(SharingPlan(), {query: snapshot(model) for query, model in ctx.originals.items()})
    arms = [(NONE, empty), *([merged_of(ctx, bundle)] if bundle else [])]
    for name, merged in arms:
        if name in found.get("arms", {}):
            say(f"{name}: already done")
            continue
        say(f"{name}: {ctx.workload.name} from {weights} on")
        weights_of = [query.weights for query in ctx.queries.values()]
        made_of = [fingerprint(one).hex() for one in (None if name == NONE else bundle, *weights_of)]
        folder = Path(f"{kept}.{name}{WORK_SUFFIX}")
        checkpoint = Checkpoint(folder, {**asked, "made_of": made_of}, resume=True, what="search for widths")
        arm = found.get("arms", {}).get(NONE) if name != NONE and merged_nothing(merged, empty) else None
        if arm is None:
            arm = smallest(ctx, merged, weights, checkpoint)
        found = {
            **asked,
            "ceiling_fraction": ceiling_bytes(ctx.layers) / sizes,
            "machine": machine(),
            "date": datetime.now(timezone.utc).date().isoformat(),
            "arms": {**found.get("arms", {}), name: arm},
        }
        with open_atomic(kept, overwrite=True) as file:
            file.write((json.dumps(found, indent=1) + "\n").encode())
        checkpoint.remove()
    return found


def main(arguments: list[str] | None = None) -> int:
    """The command; exit code 2 with one line for bad input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", type=Path)
    parser.add_argument("--bundle", type=Path, help="what was merged of it, in float32")
    parser.add_argument("--weights", choices=list(BIT_WIDTHS), default="int4", help="the fewest bits tried")
    parser.add_argument("--json", type=Path, required=True, help="where the figures are kept")
    given = parser.parse_args(arguments)
    try:
        with show_progress() as progress:
            found = measured(given.workload, given.bundle, given.weights, given.json, progress)
    except InputError as error:
        say(f"error: {error}")
        return 2
    for row in (HEADS, *rows([found])):
        print(*row, sep="\t")
    return 0


if __name__ == "__main__":
    sys.exit(main())
