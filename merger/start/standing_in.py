"""Which parts of one network could stand in for those of another: the same trunk, deeper or shallower.

A residual network answers nearly as well with some of its blocks left out (Veit, Wilber and Belongie, Residual
Networks Behave Like Ensembles of Relatively Shallow Networks, NeurIPS 2016), so a shallower network of its family can
be cut out of it whole, norms among it. Two networks are laid beside each other module by module: children of one name,
and in a sequence runs of blocks whose tensors have the same shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, product

from torch import Tensor, nn

DEPTH = 2
"""How deep a trunk may lie within a model: a detector's is its `backbone.body`."""

Shapes = tuple[tuple[str, tuple[int, ...]], ...]
Named = tuple[str, nn.Module]


def standing_in(taker: nn.Module, giver: nn.Module) -> dict[str, str]:
    """Path of every module with tensors of its own in `taker` -> path of the one in `giver` that can stand in for it.

    Tensors of both have the same names and shapes. What has no counterpart is left out. Of all trunks within the two
    models those are laid beside each other that have most elements in common.
    """
    size = {path: sum(tensor.numel() for tensor in _own(module).values()) for path, module in taker.named_modules()}
    found = (dict(_pairs(mine, theirs)) for mine, theirs in product(_trunks(taker), _trunks(giver)))
    return max(found, key=lambda pairs: sum(size[path] for path in pairs), default={})


def _trunks(model: nn.Module) -> list[Named]:
    """The model and the larger parts of it that have names; a numbered block of a sequence is no trunk."""
    found = [(path, module) for path, module in model.named_modules() if path.count(".") < DEPTH]
    return [(path, module) for path, module in found if any(module.children()) and not _numbered(path)]


def _pairs(mine: Named, theirs: Named) -> Iterator[tuple[str, str]]:
    """Paths of modules that meet within these two, themselves among them."""
    if (own := _shapes(_own(mine[1]))) and own == _shapes(_own(theirs[1])):
        yield mine[0], theirs[0]
    children, others = _children(mine), _children(theirs)
    if _is_sequence(children) and _is_sequence(others):
        meeting = _blocks(children, others)
    else:
        known = {path.rpartition(".")[2]: (path, module) for path, module in others}
        names = ((path.rpartition(".")[2], (path, module)) for path, module in children)
        meeting = [(child, known[name]) for name, child in names if name in known]
    for child, other in meeting:
        yield from _pairs(child, other)


def _children(parent: Named) -> list[Named]:
    """The children that have tensors, under their paths."""
    path, module = parent
    named = ((f"{path}.{name}" if path else name, child) for name, child in module.named_children())
    return [(place, child) for place, child in named if child.state_dict()]


def _is_sequence(children: Sequence[Named]) -> bool:
    return bool(children) and all(_numbered(path) for path, _ in children)


def _numbered(path: str) -> bool:
    return path.rpartition(".")[2].isdigit()


def _blocks(mine: Sequence[Named], theirs: Sequence[Named]) -> list[tuple[Named, Named]]:
    """The blocks of two sequences that meet: each run of equal shapes with the next run of these shapes."""
    runs, pairs = _runs(theirs), list[tuple[Named, Named]]()
    for shapes, run in _runs(mine):
        place = next((place for place, (other, _) in enumerate(runs) if other == shapes), None)
        if place is not None:
            others, first = runs[place][1], run[0] is mine[0] and runs[place][1][0] is theirs[0]
            pairs += [(run[index], others[other]) for index, other in _spread(len(run), len(others), first)]
            runs = runs[place + 1 :]
    return pairs


def _runs(blocks: Sequence[Named]) -> list[tuple[Shapes, list[Named]]]:
    return [(shapes, list(run)) for shapes, run in groupby(blocks, lambda block: _shapes(block[1].state_dict()))]


def _spread(count: int, among: int, first: bool) -> list[tuple[int, int]]:
    """So many blocks evenly among others, in order and the last by the last; the `first` of a sequence by the first."""
    if count >= among:
        return [(index, index) for index in range(among)]
    if first and count > 1:
        return [(0, 0), *((1 + index, 1 + other) for index, other in _spread(count - 1, among - 1, False))]
    return [(index, 0 if first else round((index + 1) * among / count) - 1) for index in range(count)]


def _own(module: nn.Module) -> dict[str, Tensor]:
    """The tensors that a module has itself, by name."""
    return {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}


def _shapes(tensors: Mapping[str, Tensor]) -> Shapes:
    return tuple((key, tuple(tensor.shape)) for key, tensor in tensors.items())
