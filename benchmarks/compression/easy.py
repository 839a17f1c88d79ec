"""How easy a workload is: what its originals keep in one to four bits, and what a linear probe on their stem reaches.

Usage: python -m benchmarks.compression.easy WORKLOAD.yaml --json FILE

All the weights that `gemel merge --weights int4` packs (no heads, no depthwise layers) are rounded to 1, 2, 3 or 4
bits, and nothing is trained. In one bit a weight is its sign times the mean magnitude of its channel (Rastegari et al.,
XNOR-Net, ECCV 2016); more bits are those of models.quantization. Norms keep their statistics or have them measured
again on 512 train frames, whichever 512 frames of val prefer. The probe of a classifier is a linear layer on what its
first norm puts out (after a ReLU, in 4 x 4 places), trained on train, its weight decay chosen on val. All is judged on
test. FILE keeps a query as soon as it is there, and what is there is not done again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.data import splits
from benchmarks.data.files import say
from benchmarks.machine import machine
from merger.core.context import MergeContext
from models.batchnorm import batchnorms_of
from models.data import PreparedFrames, Split
from models.errors import InputError
from models.evaluation import is_competent, predict, score
from models.io import open_atomic
from models.quantization import choices, pack
from models.sharing.layers import layers_of, weight_key
from models.tasks import task_of
from models.workload import Query, load_workload
from models.zoo import preprocess_of

BITS = (1, 2, 3, 4)
PLACES = 4
PROBED = 4096
"""Train frames of a probe at most, evenly taken."""
JUDGED = 512
"""Val frames at most by which it is chosen whether norms are measured again, evenly taken."""
DECAYS = (1e-4, 1e-2, 1.0)
STEPS = 60
HEADS = ("workload", "query", "model", "metric", "original", *(f"{bits} bit" for bits in BITS), "probe", "chance")


def rounded(weight: Tensor, bits: int) -> Tensor:
    """A float32 weight (out, ...) as so few bits hold it."""
    if bits > 1:
        return pack(weight, f"int{bits}").wide()  # type: ignore[arg-type]
    rows = weight.reshape(len(weight), -1)
    return torch.where(rows >= 0, 1.0, -1.0).mul_(rows.abs().mean(1, keepdim=True)).view(weight.shape)


@torch.no_grad()
def in_bits(ctx: MergeContext, query: str, bits: int, val: PreparedFrames) -> nn.Module:
    """The query's original with its weights in so many bits, its norms as `val` prefers them."""
    model = ctx.models([query])[query]
    state = model.state_dict(keep_vars=True)
    heads = {weight_key(state, layer.path) for layer in layers_of(ctx.queries[query]) if layer.head}
    for key, tensor in state.items():
        if tensor.dtype == torch.float32 and "int4" in choices(key, tensor.shape, "int4", key in heads):
            tensor.copy_(rounded(tensor.detach(), bits))
    before = reached(ctx, query, model, val)
    norms = {name: buffer.clone() for name, buffer in model.named_buffers()}
    if ctx.calibrate(query, model) and reached(ctx, query, model, val) < before:
        model.load_state_dict(norms, strict=False)
    return model


def few(ctx: MergeContext, query: Query) -> PreparedFrames:
    """At most JUDGED frames of val."""
    val = ctx.val[query.id].split
    chosen = splits.thin(range(len(val)), JUDGED)
    truths = None if val.labels is None else tuple(val.labels[index] for index in chosen)
    units, times_s = tuple(val.units[index] for index in chosen), tuple(val.times_s[index] for index in chosen)
    return PreparedFrames(
        query, Split(val.name, [val.frames[index] for index in chosen], truths, units, times_s)
    ).load()


def reached(ctx: MergeContext, query: str, model: nn.Module, frames: PreparedFrames) -> float:
    """The model's metric on these frames, by labels where there are any, else by the original's own answers."""
    found, threshold = ctx.queries[query], ctx.references[query].threshold
    task, truths = task_of(found.task), frames.split.labels
    if truths is None:
        truths = [task.labels_of(one, threshold) for one in predict(ctx.originals[query], found, frames)]
    return score(task, predict(model, found, frames), truths, found.classes, threshold)


@torch.no_grad()
def stem(model: nn.Module, query: Query, prepared: PreparedFrames, indices: Sequence[int]) -> Tensor:
    """What the first norm of a model makes of these frames: f32 (N, channels x PLACES x PLACES)."""
    seen: list[Tensor] = []

    def keep(_module: nn.Module, _given: object, out: Tensor) -> None:
        seen.append(out)

    hook = batchnorms_of(model)[0].register_forward_hook(keep)
    preprocess = preprocess_of(query.model, query.input_size)
    for start in range(0, len(indices), 32):
        model(preprocess.normalise(prepared.batch(indices[start : start + 32])))
        seen[-1] = F.adaptive_avg_pool2d(seen[-1].relu(), PLACES).flatten(1)
    hook.remove()
    return torch.cat(seen)


def probe(ctx: MergeContext, query: Query) -> float | None:
    """Balanced accuracy on test of a linear layer on the stem; None for a detector and for a model without norms."""
    original, train = ctx.originals[query.id], ctx.train[query.id]
    if query.task != "classification" or train.targets is None or not batchnorms_of(original):
        return None
    task, sets = task_of(query.task), (ctx.val[query.id], ctx.test[query.id])
    chosen = train.spread(PROBED)
    learnt = stem(original, query, train.prepared, chosen)
    mean, deviation = learnt.mean(0), learnt.std(0) + 1e-6
    evaluated = [(stem(original, query, one, range(len(one))) - mean) / deviation for one in sets]
    labels = torch.tensor([train.targets[index] for index in chosen])
    found = []
    for decay in DECAYS:
        layer = _fitted((learnt - mean) / deviation, labels, len(query.classes), decay)
        with torch.no_grad():
            found.append([
                score(task, task.predictions(layer, layer(x), [], query.classes), one.split.labels or (), query.classes, 0)
                for x, one in zip(evaluated, sets, strict=True)
            ])  # fmt: skip
    return max(found, key=lambda pair: pair[0])[1]


def _fitted(x: Tensor, labels: Tensor, classes: int, decay: float) -> nn.Linear:
    """Logistic regression with every class of equal weight; `decay` is that of the squared weights."""
    layer = nn.Linear(x.shape[1], classes)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    counts = torch.bincount(labels, minlength=classes).clamp(min=1)
    solver = torch.optim.LBFGS(layer.parameters(), max_iter=STEPS, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        solver.zero_grad()
        loss = F.cross_entropy(layer(x), labels, weight=len(labels) / (classes * counts))
        loss = loss + decay * layer.weight.square().mean()
        loss.backward()
        return loss

    solver.step(closure)
    return layer


def measured(ctx: MergeContext, query: Query) -> dict[str, Any]:
    """All of one query."""
    test, val = ctx.test[query.id], few(ctx, query)
    original = reached(ctx, query.id, ctx.originals[query.id], test)
    return {
        "query": query.id,
        "model": query.model,
        "metric": task_of(query.task).metric,
        "samples": len(test),
        "original": original,
        "worth": is_competent(query, original),
        "bits": {str(bits): reached(ctx, query.id, in_bits(ctx, query.id, bits, val), test) for bits in BITS},
        "probe": probe(ctx, query),
        "chance": task_of(query.task).chance(query.classes),
    }


def kept_of(ctx: MergeContext, path: Path) -> dict[str, Any]:
    """What `path` keeps of this workload, with the queries that were missing measured and kept."""
    name = ctx.workload.name
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"workload": name}
    if found["workload"] != name:
        raise InputError(path, f"was measured of {found['workload']}", "give another --json")
    for query in ctx.workload.queries:
        done = found.get("queries", [])
        if query.id in [one["query"] for one in done]:
            say(f"{query.id}: already done")
            continue
        say(query.id)
        one = measured(ctx, query)
        found |= {"machine": machine(), "date": datetime.now(timezone.utc).date().isoformat(), "queries": [*done, one]}
        with open_atomic(path, overwrite=True) as file:
            file.write((json.dumps(found, indent=1) + "\n").encode())
    return found


def rows(kept: Sequence[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
    """A row of HEADS for each query of each workload."""
    return [
        (
            one["workload"], row["query"], row["model"], row["metric"].replace("_", " "),
            row["original"] if row["worth"] else f"{row['original']:.3f} (no evidence)",
            *(row["bits"][str(bits)] for bits in BITS),
            "-" if row["probe"] is None else row["probe"], row["chance"] or "-",
        )
        for one in kept
        for row in one["queries"]
    ]  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """The command; exit code 2 with one line for bad input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", type=Path)
    parser.add_argument("--json", type=Path, required=True, help="where the figures are kept")
    given = parser.parse_args(arguments)
    try:
        found = kept_of(MergeContext(load_workload(given.workload)), given.json)
    except InputError as error:
        say(f"error: {error}")
        return 2
    for row in rows([found]):
        print(*row, sep="\t")
    return 0


if __name__ == "__main__":
    sys.exit(main())
