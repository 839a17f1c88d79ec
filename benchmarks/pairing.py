"""Measures which layers meet: networks laid side by side (ours) against plain order of occurrence (the paper's).

Usage: python -m benchmarks.pairing [--workload FILE --epochs N --seeds N]

First, without weights: pairs of models whose layers have true counterparts in each other; prints the share of layers,
and of bytes, that meet theirs. Then, with a workload of trained
originals: everything tied either way, a short joint training, and the mean and worst ratio on val.
"""

from __future__ import annotations

import argparse
import json
from typing import Any, get_args

from models.sharing.groups import Pairing, groups
from models.sharing.layers import Layer, describe
from models.sharing.plan import SharingPlan
from models.sharing.similarity import cosine_likeness
from models.zoo.registry import ENTRIES

PAIRS = (
    ("resnet50", "fasterrcnn_resnet50_fpn"),
    ("resnet101", "fasterrcnn_resnet101_fpn"),
    ("resnet18", "ssd_resnet18"),
    ("vgg16", "ssd300_vgg16"),
    ("mobilenet_v2", "ssdlite320_mobilenet_v2"),
    ("mobilenet_v3_large", "fasterrcnn_mobilenet_v3_large_fpn"),
    ("fasterrcnn_resnet50_fpn", "fasterrcnn_resnet101_fpn"),
    ("fasterrcnn_resnet50_c5", "fasterrcnn_resnet101_c5"),
)
BODY = "backbone.body."
"""What detectors of different depth have in common but cannot match by name; left out of their counterparts."""


def main() -> None:
    """Run what was asked for and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", help="a workload with trained originals")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    found: dict[str, Any] = {"counterparts": [counterparts(*pair) for pair in PAIRS]}
    if options.workload:
        found["trained"] = trained(options.workload, options.epochs, options.seeds)
    print(json.dumps(found, indent=2))


def counterparts(one: str, other: str) -> dict[str, Any]:
    """Of the layers that meet one of the other model, the share that meets the one it truly is there.

    A classifier is the beginning of its detector, so its k-th layer is the detector's k-th. Of two detectors, the
    layers outside the backbone's body are those of the same name.
    """
    layers = [_layers("one", one), _layers("other", other)]
    rows = [[layer.path for layer in side] for side in layers]
    size = {layer.path: layer.bytes for layer in layers[0]}
    by_name = ENTRIES[one].task == ENTRIES[other].task

    def true(path: str) -> str | None:
        if by_name:
            return path if path in rows[1] and not path.startswith(BODY) else None
        return rows[1][rows[0].index(path)]

    found: dict[str, Any] = {"one": one, "other": other}
    for pairing in get_args(Pairing):
        met = [dict(group.members) for group in groups(layers[0] + layers[1], pairing=pairing)]
        known = [pair for pair in met if true(pair["one"]) is not None]
        right = [pair["one"] for pair in known if pair["other"] == true(pair["one"])]
        share = sum(size[path] for path in right) / sum(size[pair["one"]] for pair in known)
        found[pairing] = {"layers": len(right) / len(known), "bytes": share}
    return found


def trained(workload: str, epochs: int, seeds: int) -> list[dict[str, Any]]:
    """Mean and worst ratio on val after tying everything and so many epochs of joint training, per pairing and seed."""
    from merger.checkpoint import StepCache
    from merger.config import TopDownConfig
    from merger.context import MergeContext
    from merger.init.start import prepare_start
    from merger.training.recipe import Recipe
    from models.workload import load_workload

    ctx = MergeContext(load_workload(workload))
    likeness = cosine_likeness({query: model.state_dict() for query, model in ctx.originals.items()})
    rows = []
    for seed in range(seeds):
        for pairing in get_args(Pairing):
            plan = SharingPlan.of(groups(ctx.layers, pairing=pairing, likeness=likeness))
            models = ctx.tie_models(
                plan, list(ctx.queries), prepare_start(ctx, plan, StepCache(), TopDownConfig()).initialise(plan)
            )
            training = ctx.training(models, Recipe(epochs=epochs, seed=seed, features=1.0))
            for _ in range(epochs):
                training.epoch()
            ratios = [ctx.ratio(query, model) for query, model in models.items()]
            rows.append({"pairing": pairing, "seed": seed, "mean": sum(ratios) / len(ratios), "worst": min(ratios)})
            print(rows[-1], flush=True)
    return rows


def _layers(role: str, model: str) -> list[Layer]:
    entry = ENTRIES[model]
    return [Layer(role, *row) for row in describe(model, entry.width, entry.input_size, entry.task).layers]


if __name__ == "__main__":
    main()
