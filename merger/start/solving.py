"""Tied weights solved by least squares, so that each member's layer answers as its original's did.

In the order of the network every set gets the weight W that minimises, over its members, the sum of
||W x - y||^2 / var(y), x being what goes into the layer in the merged network so far and y what the original's
answered to the same frame (RegMean, Jin et al., ICLR 2023, with inputs that follow the merge). A ridge holds W near
the weight it starts from. Means are taken out of x and y, for private biases and norms restore them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from merger.checkpoint import State, StepCache
from merger.core.context import MergeContext
from merger.core.probing import as_input, modules_among, raw_frames, tapped
from merger.training.data import seed_of
from models.batchnorm import batchnorms_of
from models.sharing.layers import weight_key
from models.sharing.plan import Member, SharingPlan

FRAMES = 32
BATCH = 8
STAGES = 8
"""Sets are solved in so many runs; those of one run do not see each other's new weights."""
PLACES = 64
"""Places of a frame at which a layer's inputs and outputs are compared, drawn at random."""
MAX_INPUTS = 2500
"""Layers that take more numbers for one output keep the weight they start from: solving costs their cube."""
RIDGE = 1e-2
"""How much the start weighs, as a part of the mean variance of the inputs."""
MIN_VARIANCE = 1e-12

Sets = Sequence[tuple[Member, ...]]


def solved(
    ctx: MergeContext,
    plan: SharingPlan,
    originals: Mapping[str, State],
    states: Mapping[str, State],
    journal: StepCache,
) -> dict[str, State]:
    """`states` with the weights of the plan's sets solved; `originals` say what each query's layers shall answer.

    Both must have their channels in one order. Every stage costs three passes of a few frames per query, and what the
    equations take.
    """
    found = {query: dict(state) for query, state in states.items()}
    position = {(layer.query, layer.path): layer.position for layer in ctx.layers}
    sets = sorted(plan.shared, key=lambda members: sum(map(position.__getitem__, members)) / len(members))
    size = -(-len(sets) // STAGES)
    for start in range(0, len(sets), size or 1):
        stage = sets[start : start + size]
        run = partial(_solve, ctx, stage, originals, found)
        for query, changes in journal.step(f"solve from {start}", run).items():
            found[query].update(changes)
    return found


@torch.no_grad()
def _solve(
    ctx: MergeContext, stage: Sets, originals: Mapping[str, State], states: Mapping[str, State]
) -> dict[str, State]:
    """Query -> what changes in its state: the weights of these sets, and the members' own biases."""
    paths: dict[str, list[str]] = {}
    for members in stage:
        for query, path in members:
            paths.setdefault(query, []).append(path)
    equations: dict[Member, _Equations] = {}
    for query, own in paths.items():
        found = _equations(ctx, query, own, originals, states)
        equations.update({(query, path): equation for path, equation in found.items()})
    changes: dict[str, State] = {query: {} for query in paths}
    for members in stage:
        present = {member: equations[member] for member in members if member in equations}
        if len(present) < len(members):
            continue  # somebody's answers cannot be asked for, and a weight that forgets it would harm it
        key = {member: weight_key(states[member[0]], member[1]) for member in members}
        weight = _best_weight(list(present.values()), states[members[0][0]][key[members[0]]])
        ctx.flops.add_flops(sum(one.flops for one in present.values()) + flops_of_solving(*weight.shape))
        for member, equation in present.items():
            query, path = member
            changes[query][key[member]] = weight.reshape(states[query][key[member]].shape)
            if f"{path}.bias" in states[query]:
                changes[query][f"{path}.bias"] = equation.bias(weight)
    return changes


def _best_weight(equations: Sequence[_Equations], start: Tensor) -> Tensor:
    """(out, in) of the least squares over all members, each scaled by the variance of what it shall answer.

    It is found where the equations are, and lies where `start` does.
    """
    xx, xy = torch.zeros(()), torch.zeros(())
    for equation in equations:
        own_xx, own_xy, variance = equation.centred()
        xx, xy = own_xx / variance + xx, own_xy / variance + xy
    before = start.flatten(1).to(xx).T
    ridge = RIDGE * xx.diagonal().mean().clamp(min=MIN_VARIANCE)
    change = torch.linalg.solve(xx + ridge * torch.eye(len(xx), dtype=xx.dtype, device=xx.device), xy - xx @ before)
    return (before + change).T.to(start)


def flops_of_solving(outputs: int, inputs: int) -> int:
    """FLOPs of the least squares of one weight (outputs, inputs): a factorisation, and two products for its answers."""
    return 2 * inputs**3 // 3 + 4 * inputs**2 * outputs


def most_flops(ctx: MergeContext, plan: SharingPlan) -> int:
    """About what the equations of all sets take at most, beside the passes of frames."""
    total = 0
    for members in plan.shared:
        query, path = members[0]
        state = ctx.originals[query].state_dict()
        outputs, inputs = state[weight_key(state, path)].flatten(1).shape
        if inputs <= MAX_INPUTS:
            total += len(members) * _flops_of_sums(FRAMES * PLACES, inputs, outputs) + flops_of_solving(outputs, inputs)
    return total


def _flops_of_sums(count: int, inputs: int, outputs: int) -> int:
    return 2 * count * inputs * (inputs + outputs)


def _solvable(layer: nn.Module) -> bool:
    if isinstance(layer, nn.Conv2d):
        plain = layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
        return plain and layer.weight[0].numel() <= MAX_INPUTS
    return isinstance(layer, nn.Linear) and layer.in_features <= MAX_INPUTS


def _equations(
    ctx: MergeContext, query: str, paths: Sequence[str], originals: Mapping[str, State], states: Mapping[str, State]
) -> dict[str, _Equations]:
    """Path -> sums over samples of what goes in (the merged network) and what shall come out (the original's).

    Both are made here, for a card has no room for those of all queries.
    """
    model, teacher = (ctx.models([query], given)[query] for given in (states, originals))
    paths = [path for path in modules_among(model, paths) if _solvable(model.get_submodule(path))]
    ctx.calibrate(query, model, FRAMES)
    for one in (model, teacher):
        one.eval()
    has_norms = bool(batchnorms_of(model))
    found: dict[str, _Equations] = {}
    frames = raw_frames(ctx, query, FRAMES)
    for start in range(0, len(frames), BATCH):
        batch = as_input(ctx, query, frames[start : start + BATCH])
        with tapped(model, paths) as seen, tapped(teacher, paths) as wanted:
            model(batch)
            teacher(batch)
        for path in paths:
            if path not in seen or seen[path][1].shape != wanted[path][1].shape:
                continue  # a region of a frame that only one of the two looked at
            layer = model.get_submodule(path)
            if path not in found:
                centred = has_norms or getattr(layer, "bias", None) is not None
                found[path] = _Equations(centred)
            generator = torch.Generator().manual_seed(seed_of(ctx.seed, query, path, start))
            found[path].add(*_samples(layer, seen[path][0], wanted[path][1], generator))
    ctx.flops.add(ctx.queries[query], 2 * len(frames))
    return found


def _samples(layer: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Inputs (n, in) as the layer's weight meets them, and outputs (n, out), at random places of each frame."""
    if isinstance(layer, nn.Linear):
        return x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])
    assert isinstance(layer, nn.Conv2d)
    inputs, outputs = [], []
    for frame, answer in zip(x, y):
        columns = F.unfold(frame[None], layer.kernel_size, layer.dilation, layer.padding, layer.stride)[0]  # type: ignore[arg-type]
        places = torch.randperm(columns.shape[1], generator=generator)[:PLACES].to(columns.device)
        inputs.append(columns[:, places].T)
        outputs.append(answer.flatten(1)[:, places].T)
    return torch.cat(inputs), torch.cat(outputs)


class _Equations:
    """The normal equations of one member: sums of x x', x y' and y y over its samples."""

    def __init__(self, centre: bool) -> None:
        self._centre = centre
        self._count = 0
        self._sums: list[Tensor] = []

    def add(self, x: Tensor, y: Tensor) -> None:
        """Count in samples of inputs (n, in) and outputs (n, out)."""
        new = [x.sum(0), y.sum(0), x.T @ x, x.T @ y, y.square().sum(0)]
        self._sums = [old + more for old, more in zip(self._sums, new)] if self._sums else new
        self._count += len(x)

    @property
    def flops(self) -> int:
        """What the sums took."""
        return _flops_of_sums(self._count, *self._sums[3].shape)

    def centred(self) -> tuple[Tensor, Tensor, Tensor]:
        """Means of x x' and x y', and the mean variance of y, with the means taken out where they may be."""
        x, y, xx, xy, yy = (total.double() / self._count for total in self._sums)
        if self._centre:
            xx, xy = xx - torch.outer(x, x), xy - torch.outer(x, y)
        return xx, xy, (yy - y.square()).mean().clamp(min=MIN_VARIANCE)

    def bias(self, weight: Tensor) -> Tensor:
        """The bias with which the answers have the right means."""
        x, y = (total.double() / self._count for total in self._sums[:2])
        return (y - weight.to(x) @ x).to(weight)
