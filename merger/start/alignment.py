"""Channel permutations: independently trained networks brought into one order before their weights are averaged.

Two networks that learned the same thing apart keep their channels in different orders (Ainsworth, Hayase and
Srinivasa, Git Re-Basin, ICLR 2023). Here channels are matched by the correlation of what they answer to the same
frames (Li et al., Convergent Learning, 2015), not by their weights: norms are private and may scale and shift each
channel as they like, and correlation is blind to both, while products of weights are not. It needs no sweeps either:
every space of channels is matched on its own, over all tied layers that read or write it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from merger.checkpoint import State, StepCache
from merger.core.context import MergeContext
from merger.core.probing import as_input, modules_among, raw_frames, tapped
from merger.start.channels import Channels, Part, channels_of, permuted
from merger.training.distillation import watched_layers
from models.device import disable_tf32
from models.sharing.layers import weight_key
from models.sharing.plan import SharingPlan

FRAMES = 32
"""Frames of each of two queries on which their channels are compared."""
BATCH = 8
CELLS = 8
"""Height and width of the grid of places at which a map is read."""
MIN_DEVIATION = 1e-6
TOLERANCE = 1e-3
"""How far, relative to the largest value, outputs may move when channels only change places."""

Orders = Mapping[int, Tensor]


def aligned(
    ctx: MergeContext, plan: SharingPlan, donor: str, journal: StepCache, states: Mapping[str, State] | None = None
) -> dict[str, State]:
    """Every sharing query's own model with its channels in the donor's order; each answers as it did before.

    The donor comes first, then the queries with the most shared bytes; each is matched with the first in this order
    in every set. Starts from `states`, or the originals'. What goes into the heads keeps its order, because it is held
    against the originals' in distillation. A model whose graph cannot be read, or that answers
    differently once its channels are permuted, stays as it is, which progress reports.
    """
    found = {query: model.state_dict() for query, model in ctx.originals.items()} if states is None else dict(states)
    sharing = by_shared_bytes(ctx, plan)
    done: list[str] = []
    for query in sorted(sharing, key=lambda query: query != donor):
        orders = journal.step(f"order of {query}", partial(_orders, ctx, plan, query, done, found)) if done else {}
        if channels := orderable(ctx, query) if orders else None:
            found[query] = permuted(found[query], channels, orders)
        done.append(query)
    return found


def by_shared_bytes(ctx: MergeContext, plan: SharingPlan) -> list[str]:
    """The queries that share, those with the most bytes in shared layers first."""
    size = {(layer.query, layer.path): layer.bytes for layer in ctx.layers}
    held = dict.fromkeys(ctx.queries, 0)
    for members in plan.shared:
        for member in members:
            held[member[0]] += size[member]
    return sorted((query for query in held if held[query]), key=lambda query: -held[query])


def orderable(ctx: MergeContext, query: str) -> Channels | None:
    """The spaces of a query's model but those that its heads read; None where its graph cannot be read."""
    model = ctx.originals[query]
    channels = channels_of(model)
    if channels is None:
        return None
    heads = watched_layers(ctx.queries[query], model)
    read = {part.space for head in heads for _, part in channels.free_in(f"{head}.weight", 1)}
    return Channels({space: width for space, width in channels.widths.items() if space not in read}, channels.uses)


def best_order(scores: Tensor) -> Tensor:
    """The order of the columns' partners: entry i is the row matched with column i, the sum of scores being largest.

    `scores` (C, C): row = own channel, column = the other's. Optimal (Kuhn 1955; Jonker and Volgenant 1987).
    """
    from scipy.optimize import linear_sum_assignment

    _, rows = linear_sum_assignment(scores.T.double().cpu().numpy(), maximize=True)
    return torch.from_numpy(rows.copy()).long()


@torch.no_grad()
def _orders(
    ctx: MergeContext, plan: SharingPlan, query: str, done: Sequence[str], states: Mapping[str, State]
) -> dict[int, Tensor]:
    """Space -> order of its channels that meets those of the models done before."""
    channels = orderable(ctx, query)
    if channels is None:
        text = f"{query}: the graph of its model cannot be read, so its channels stay in their order"
        ctx.progress("warning", text=text)
        return {}
    pairs: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for members in plan.shared:
        paths = dict(members)
        other = next((one for one in done if one in paths), None)
        if query in paths and other is not None:
            pairs[other].append((paths[query], paths[other]))
    scores = {space: torch.zeros(width, width) for space, width in channels.widths.items()}
    for other, paths in pairs.items():
        for moments in _moments(ctx, query, other, paths, states, channels).values():
            for space, moment in moments:
                scores[space] += moment.correlations().cpu()
    orders = {space: best_order(score) for space, score in scores.items() if bool(score.any())}
    if not _answers_the_same(ctx, query, states[query], channels, orders):
        text = f"{query}: its model answers differently with its channels permuted, so they stay in their order"
        ctx.progress("warning", text=text)
        return {}
    moved = sum(int((order != torch.arange(len(order))).sum()) for order in orders.values())
    ctx.progress("aligned", query=query, spaces=len(orders), moved=moved, channels=sum(map(len, orders.values())))
    return orders


def _moments(
    ctx: MergeContext,
    query: str,
    other: str,
    paths: Sequence[tuple[str, str]],
    states: Mapping[str, State],
    channels: Channels,
) -> dict[str, list[tuple[int, CrossMoments]]]:
    """Path -> (space, moments of its channels with the other's), on frames of both queries."""
    models = ctx.models([query, other], states)
    for model in models.values():
        model.eval()
    theirs = dict(paths)
    known = set(modules_among(models[other], theirs.values()))
    mine = [path for path in modules_among(models[query], theirs) if theirs[path] in known]
    spots = {path: _spots(channels, path, ctx.originals[query].state_dict()) for path in mine}
    moments = {path: [(part.space, CrossMoments()) for _, _, part in spots[path]] for path in mine}
    frames = [*raw_frames(ctx, query, FRAMES), *raw_frames(ctx, other, FRAMES)]
    for start in range(0, len(frames), BATCH):
        chunk = frames[start : start + BATCH]
        with tapped(models[query], mine) as here, tapped(models[other], [theirs[path] for path in mine]) as there:
            models[query](as_input(ctx, query, chunk))
            models[other](as_input(ctx, other, chunk))
        for path in mine:
            if len(here[path][1]) != len(there[theirs[path]][1]):
                continue  # regions of a frame, of which each chose its own
            for (axis, begin, part), (_, moment) in zip(spots[path], moments[path]):
                own, its = here[path][1 - axis], there[theirs[path]][1 - axis]
                moment.add(*_samples(own, its, begin, part.width, part.repeat))
    for one in (query, other):
        ctx.flops.add(ctx.queries[one], len(frames))
    return moments


def _spots(channels: Channels, path: str, state: Mapping[str, Tensor]) -> list[tuple[int, int, Part]]:
    """Where a layer's weight meets free spaces: (axis 0 = outputs or 1 = inputs, first place on it, part)."""
    key = weight_key(state, path)
    return [(axis, begin, part) for axis in (0, 1) for begin, part in channels.free_in(key, axis)]


def _samples(own: Tensor, its: Tensor, begin: int, width: int, repeat: int) -> tuple[Tensor, Tensor]:
    """What `width` channels from `begin` on say at the same places in two maps: two tensors (samples, width)."""
    own, its = (_as_map(x, begin, width, repeat) for x in (own, its))
    grid = [min(a, b, CELLS) for a, b in zip(own.shape[2:], its.shape[2:])]
    own, its = (F.interpolate(x, size=grid, mode="nearest") for x in (own, its))
    return tuple(x.movedim(1, -1).reshape(-1, width) for x in (own, its))  # type: ignore[return-value]


def _as_map(x: Tensor, begin: int, width: int, repeat: int) -> Tensor:
    """(N, C, H, W) of some channels; those of a flattened map stand in a row of `repeat` places each."""
    if x.ndim == 4:
        return x[:, begin : begin + width]
    chosen = x.reshape(-1, x.shape[-1])[:, begin : begin + width * repeat]
    return chosen.reshape(len(chosen), width, 1, repeat)


class CrossMoments:
    """Correlations between two sets of channels over batches of samples (n, C) that are given together."""

    def __init__(self) -> None:
        self._count = 0
        self._sums: list[Tensor] = []

    def add(self, own: Tensor, its: Tensor) -> None:
        """Count these samples in."""
        new = [own.sum(0), its.sum(0), own.square().sum(0), its.square().sum(0), own.T @ its]
        new = [total.double() for total in new]
        self._sums = [old + more for old, more in zip(self._sums, new)] if self._sums else new
        self._count += len(own)

    def correlations(self) -> Tensor:
        """f32 (C, C): row = own channel, column = the other's; 0 for a channel that never changes, or was not seen."""
        if not self._sums:
            return torch.zeros(())
        a, b, aa, bb, ab = (total / self._count for total in self._sums)
        deviations = [(square - mean.square()).clamp(min=0).sqrt() for mean, square in ((a, aa), (b, bb))]
        scaled = [torch.where(d > MIN_DEVIATION, 1 / d.clamp(min=MIN_DEVIATION), 0.0) for d in deviations]
        return ((ab - torch.outer(a, b)) * torch.outer(*scaled)).float()


def _answers_the_same(ctx: MergeContext, query: str, state: State, channels: Channels, orders: Orders) -> bool:
    """Whether a model's outputs stay as they are when its channels are permuted, tried on two frames.

    In full float32: a card's TF32 alone would move them as far as is allowed.
    """
    frames = as_input(ctx, query, raw_frames(ctx, query, 2))
    answers = []
    for one in (state, permuted(state, channels, orders)):
        model: nn.Module = ctx.models([query], {query: dict(one)})[query].eval()
        with torch.no_grad(), disable_tf32():
            answers.append([leaf for leaf in tree_leaves(model(frames)) if isinstance(leaf, Tensor)])
    ctx.flops.add(ctx.queries[query], 2 * len(frames))
    return all(
        before.shape == after.shape
        and bool(((before - after).abs() <= TOLERANCE * before.abs().amax().clamp(min=1e-6)).all())
        for before, after in zip(*answers)
    )
