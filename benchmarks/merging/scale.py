"""What merges of 4 to 400 queries would take on 1, 8 and 64 cards: on paper, from the planner's bytes and FLOPs.

Usage: python -m benchmarks.merging.scale

Queries are high-6's twelve, over and over, each a model of its own. The planner of merges in several processes
(merger.distributed) places them, by FLOPs and by the sets that `wide` would tie. Each card trains its own queries
beside their originals and keeps gradients and AdamW's moments of what they use; gradients of a weight that several
cards use are summed over these (all-reduce, ring). Prints the tables of docs/scale.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from merger.distributed import partition
from merger.training.recipe import Recipe, forward_flops
from models.sharing.groups import ceiling_bytes, groups
from models.sharing.layers import Layer, layers_of, model_bytes
from models.workload import load_workload

SOURCE = Path(__file__).parents[1] / "workloads" / "high-6.yaml"
COUNTS, CARDS, NEIGHBOURS = (4, 12, 40, 400), (1, 8, 64), (4, 12, 40, 400)
EPOCHS = 10
"""Of `frames_per_epoch`, assumed; trials and validation included."""
FLOPS_PER_S, LINK_BYTES_PER_S = 30e12, 25e9
"""Assumed of a card: a tenth of what it could multiply in bf16; and of the link between two."""
MOMENTS = 4
"""A trained weight, its gradient, and AdamW's two moments."""


@dataclass(frozen=True)
class Model:
    """One query's model on paper: bytes, FLOPs of a frame, and its layers."""

    kind: str
    nbytes: int
    flops: int
    layers: tuple[Layer, ...]

    @property
    def name(self) -> str:
        """The query, as its layers name it."""
        return self.layers[0].query


@dataclass(frozen=True)
class Load:
    """Of the card that has most: bytes held, seconds of computing a step, bytes it sends a step."""

    held_bytes: int
    compute_s: float
    sent_bytes: float


def main() -> None:
    """Print both tables (Markdown)."""
    recipe, kinds = Recipe(), _kinds()
    print("| queries | bytes of all | merged | cards | held by a card | computing, a step | sent, a step | a merge |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    steps = EPOCHS * recipe.frames_per_epoch // recipe.batch
    for count in COUNTS:
        models = list(_many(kinds, count))
        total, merged = sum(one.nbytes for one in models), unique_bytes(models)
        for cards in CARDS:
            if cards > count:
                continue
            load = load_of(models, cards, recipe.batch)
            hours = steps * max(load.compute_s, load.sent_bytes / LINK_BYTES_PER_S) / 3600
            sizes = f"{total / 1e9:.1f} GB | {merged / 1e9:.2f} GB | {cards} | {load.held_bytes / 1e9:.1f} GB"
            step = f"{load.compute_s:.2f} s | {load.sent_bytes / 1e9:.2f} GB"
            print(f"| {count} | {sizes} | {step} | {60 * hours:.0f} min |")
    print("\n| queries | in neighbourhoods of | merged bytes | over all at once |")
    print("| ---: | ---: | ---: | ---: |")
    models = list(_many(kinds, COUNTS[-1]))
    whole = unique_bytes(models)
    for most in NEIGHBOURS:
        nbytes = sum(unique_bytes(part) for part in neighbourhoods(models, most))
        print(f"| {len(models)} | {most} | {nbytes / 1e9:.2f} GB | {nbytes / whole:.2f} |")


def unique_bytes(models: Sequence[Model]) -> int:
    """Bytes of these models once all that can be shared among them is."""
    return sum(one.nbytes for one in models) - ceiling_bytes(layer for one in models for layer in one.layers)


def neighbourhoods(models: Sequence[Model], most: int) -> list[list[Model]]:
    """The models in parts of `most` at most, those of one kind together: what is most alike shares most."""
    alike = sorted(models, key=lambda one: one.kind)
    return [alike[start : start + most] for start in range(0, len(alike), most)]


def load_of(models: Sequence[Model], cards: int, batch: int) -> Load:
    """The largest load, with the models on the cards where a merge's own planner puts them."""
    found = groups([layer for one in models for layer in one.layers], "wide")
    users = [(Counter(query for query, _ in group.members), group.bytes) for group in found]
    where = partition({one.name: float(one.flops) for one in models}, [(own, size) for own, size in users], cards)
    known = {one.name: one for one in models}
    parts = [[known[name] for name in part] for part in where]
    sent = [0.0] * cards
    for own, nbytes in users:  # of a gradient that k cards have each sends 2 (k - 1) / k
        having = [rank for rank, part in enumerate(where) if not own.keys().isdisjoint(part)]
        for rank in having:
            sent[rank] += nbytes * 2 * (len(having) - 1) / len(having)
    return Load(
        max(sum(one.nbytes for one in part) + MOMENTS * unique_bytes(part) for part in parts),
        batch * Recipe().passes() * max(sum(one.flops for one in part) for part in parts) / FLOPS_PER_S,
        max(sent),
    )


def _kinds() -> list[Model]:
    workload = load_workload(SOURCE)
    return [
        Model(query.model, model_bytes(query), forward_flops(query), tuple(layers_of(query)))
        for query in workload.queries
    ]


def _many(kinds: Sequence[Model], count: int) -> Iterator[Model]:
    """So many models, of all kinds in turns, each under names of its own."""
    for index in range(count):
        kind = kinds[index % len(kinds)]
        name = f"{index}"
        yield replace(kind, layers=tuple(replace(layer, query=name) for layer in kind.layers))


if __name__ == "__main__":
    main()
