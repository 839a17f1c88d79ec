"""Fine-tunes of one network as one model and the differences of the others, without training: bytes and accuracy.

Usage: python -m benchmarks.merging.differences WORKLOAD.yaml... [--out FILE.json]

Every query but one keeps its own norms, biases, heads and layers that no other model has; each layer that it could
share with the base is the base's weight plus a difference in few bits (a scale for each output channel), of low rank,
or sparse (float16 factors and values). The base is the query whose differences to the others are smallest. `alone`
stores every query in few bits, without the others. `left` is the fraction of all bytes, `val` and `test` are the lowest
ratio to an original.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.real.tables import table
from gemel.merger.config import MergeOptions
from gemel.merger.context import MergeContext
from gemel.merger.methods.top_down import whole_plan
from gemel.models.bits import Bits
from gemel.models.data import PreparedFrames
from gemel.models.measures.evaluation import compare, predict
from gemel.models.predictions import Prediction
from gemel.models.quantization import MIN_ROW, pack
from gemel.models.sharing.layers import model_bytes, weight_of
from gemel.models.workload import load_workload

HALF_BYTES, SCALE_BYTES, PLACE_BYTES = 2, 4, 2
Predictions = Mapping[str, Sequence[Prediction]]
Form = Callable[[Tensor], tuple[Tensor, float]]
"""A difference (out, n) -> how it is restored, and its bytes."""


def in_bits(bits: int) -> Form:
    """2**bits evenly spaced values around zero, the scale of each row by the least squared error."""

    def store(rows: Tensor) -> tuple[Tensor, float]:
        levels, largest = 2**bits, rows.abs().amax(1, keepdim=True).clamp(min=1e-12)
        best, least = torch.zeros_like(rows), torch.full((len(rows), 1), torch.inf)
        for clip in torch.linspace(0.05, 1, 24).tolist():
            step = 2 * clip * largest / levels
            found = ((rows / step - 0.5).round().clamp(-levels / 2, levels / 2 - 1) + 0.5) * step
            error = (found - rows).square().sum(1, keepdim=True)
            best, least = torch.where(error < least, found, best), torch.minimum(error, least)
        return best, rows.numel() * bits / 8 + SCALE_BYTES * len(rows)

    return store


def of_low_rank(fraction: float) -> Form:
    """Two factors with this fraction of the weights, of rank one at least."""

    def store(rows: Tensor) -> tuple[Tensor, float]:
        rank = max(1, int(fraction * rows.numel() / sum(rows.shape)))
        left, values, right = torch.linalg.svd(rows, full_matrices=False)
        half = values[:rank].sqrt()
        found = (left[:, :rank] * half).half().float() @ (half[:, None] * right[:rank]).half().float()
        return found, HALF_BYTES * rank * sum(rows.shape)

    return store


def sparse(fraction: float) -> Form:
    """The largest values, this fraction of all."""

    def store(rows: Tensor) -> tuple[Tensor, float]:
        count = max(1, int(fraction * rows.numel()))
        least = rows.abs().flatten().kthvalue(rows.numel() - count + 1).values
        kept = rows.abs() >= least
        return torch.where(kept, rows.half().float(), 0), (HALF_BYTES + PLACE_BYTES) * int(kept.sum())

    return store


FORMS: dict[str, Form] = {
    "none": lambda rows: (torch.zeros_like(rows), 0.0),
    **{f"{bits} bits": in_bits(bits) for bits in (1, 2, 4)},
    **{f"rank, 1/{part}": of_low_rank(1 / part) for part in (32, 16, 8, 4)},
    **{f"sparse, 1/{part}": sparse(1 / part) for part in (32, 16, 8)},
}


def difference_layers(ctx: MergeContext, base: str) -> dict[str, dict[str, str]]:
    """Query -> its layers -> the base's layer that each could share; depthwise ones would save little."""
    found: dict[str, dict[str, str]] = {query: {} for query in ctx.queries if query != base}
    for members in whole_plan(ctx, MergeOptions()).shared:
        if paths := [path for query, path in members if query == base]:
            for query, path in members:
                if query != base and weight(ctx.originals[query], path)[0].numel() >= MIN_ROW:
                    found[query][path] = paths[0]
    return found


def weight(model: nn.Module, path: str) -> Tensor:
    """The weight of the layer at this path."""
    owner, attribute = weight_of(model, path)
    return getattr(owner, attribute)


def restore_models(
    ctx: MergeContext, base: str, form: Form, bits: Bits | None = None
) -> tuple[dict[str, nn.Module], float]:
    """All queries' models as they would be restored from a base (in these bits), and the bytes of all."""
    models, total = dict(ctx.originals), float(model_bytes(ctx.queries[base]))
    if bits:
        models[base], total = in_few_bits(ctx, base, bits)
    for query, layers in difference_layers(ctx, base).items():
        models[query] = copy.deepcopy(ctx.originals[query])
        total += model_bytes(ctx.queries[query])
        for path, other in layers.items():
            mine, theirs = weight(models[query], path), weight(models[base], other)
            found, stored = form((mine - theirs).reshape(len(mine), -1))
            mine.copy_(theirs + found.view(mine.shape))
            total += stored - mine.nbytes
    return models, total


def in_few_bits(ctx: MergeContext, query: str, bits: Bits) -> tuple[nn.Module, float]:
    """The query's model with its weights in these bits, heads and depthwise layers apart, and its bytes."""
    model, total = copy.deepcopy(ctx.originals[query]), float(model_bytes(ctx.queries[query]))
    for layer in ctx.layers:
        if layer.query == query and not layer.head:
            mine = weight(model, layer.path)
            if mine[0].numel() >= MIN_ROW:
                packed = pack(mine, bits)
                mine.copy_(packed.wide())
                total += packed.tensor.nbytes + SCALE_BYTES * len(mine) - mine.nbytes
    return model, total


def alone(ctx: MergeContext, bits: Bits) -> tuple[dict[str, nn.Module], float]:
    """Every query's model in these bits, and the bytes of all."""
    found = {query: in_few_bits(ctx, query, bits) for query in ctx.queries}
    return {query: model for query, (model, _) in found.items()}, sum(nbytes for _, nbytes in found.values())


def lowest_ratio(
    ctx: MergeContext, split: Mapping[str, PreparedFrames], answers: Predictions, models: Mapping[str, nn.Module]
) -> float:
    """The lowest ratio on a split of the queries whose model is not their original; `answers` are the originals'."""
    changed = [query for query, model in models.items() if model is not ctx.originals[query]]
    return min(
        compare(
            ctx.queries[query], split[query].split, answers[query],
            predict(models[query], ctx.queries[query], split[query]), ctx.references[query].threshold,
        ).ratio
        for query in changed
    )  # fmt: skip


@torch.no_grad()
def measure(path: Path) -> list[dict[str, object]]:
    """The rows of one workload."""
    ctx, rows = MergeContext(load_workload(path)), list[dict[str, object]]()
    everything = sum(map(model_bytes, ctx.queries.values()))

    def distance(base: str) -> float:
        layers = difference_layers(ctx, base)
        return sum(
            float((weight(ctx.originals[query], path) - weight(ctx.originals[base], other)).norm())
            for query, mine in layers.items()
            for path, other in mine.items()
        )

    base, splits = min(ctx.queries, key=distance), {"val": ctx.val, "test": ctx.test}
    answers = {
        name: {query: predict(model, ctx.queries[query], split[query]) for query, model in ctx.originals.items()}
        for name, split in splits.items()
    }
    arms = {name: (base, lambda form=form: restore_models(ctx, base, form)) for name, form in FORMS.items()}
    arms |= {
        f"int8 base, {name}": (base, lambda form=FORMS[name]: restore_models(ctx, base, form, "int8"))
        for name in ("1 bits", "2 bits", "4 bits")
    }
    widths: tuple[Bits, ...] = ("int8", "int4")
    arms |= {f"alone, {bits}": ("", lambda bits=bits: alone(ctx, bits)) for bits in widths}
    for name, (used, build) in arms.items():
        began = time.monotonic()
        models, total = build()
        seconds = time.monotonic() - began
        ratios = {part: lowest_ratio(ctx, split, answers[part], models) for part, split in splits.items()}
        rows.append({"workload": ctx.workload.path.parent.name, "base": used, "form": name, "left": total / everything,
                     **ratios, "seconds": seconds})  # fmt: skip
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="One model and the differences of its fine-tunes, without training.")
    parser.add_argument("workloads", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, help="a JSON file for the rows")
    given = parser.parse_args(arguments)
    rows = [row for path in given.workloads for row in measure(path)]
    columns = ("workload", "base", "form", "left", "val", "test", "seconds")
    cells = [[f"{row[c]:.3f}" if isinstance(row[c], float) else str(row[c]) for c in columns] for row in rows]
    print(table("Fine-tunes as differences", columns, cells))
    if given.out:
        given.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
