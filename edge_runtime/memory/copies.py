"""Copies: which stretches of the bundle go where in the arena, each as long as tensors lie together in both."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from edge_runtime.memory.placing import Placement, footprint_bytes


@dataclass(frozen=True, slots=True)
class Extent:
    """Where a tensor is stored: `nbytes` from `offset` on in the bundle's data section, at a multiple of 512."""

    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.offset + footprint_bytes(self.nbytes)


@dataclass(frozen=True, slots=True)
class Copy:
    """Tensors that lie together in the bundle and in the arena, moved at once, the gaps between them included.

    `ends` says how many bytes of the copy must have arrived for each of the `names` to be there.
    """

    source: int
    target: int
    nbytes: int
    names: tuple[str, ...]
    ends: tuple[int, ...]


def stored_runs(
    names: Iterable[str], extents: Mapping[str, Extent], footprints: Mapping[str, int]
) -> list[list[tuple[str, int]]]:
    """Tensors, in the order they are stored in, with the bytes they will occupy, in groups that lie together in the
    bundle; empty ones need no place.
    """
    runs: list[list[tuple[str, int]]] = []
    end = -1
    for name in names:
        extent = extents[name]
        if not extent.nbytes:
            continue
        if extent.offset != end:
            runs.append([])
        runs[-1].append((name, footprints[name]))
        end = extent.end
    return runs


def copies_of(
    names: Collection[str], extents: Mapping[str, Extent], placed: Mapping[str, Placement]
) -> tuple[Copy, ...]:
    """One copy for each stretch of tensors, in the order they are stored in, that lie together in both places."""
    groups: list[list[str]] = []
    stored_end = placed_end = -1
    for name in names:
        extent, offset = extents[name], placed[name].offset
        if not extent.nbytes:
            continue
        if extent.offset != stored_end or offset != placed_end:
            groups.append([])
        groups[-1].append(name)
        stored_end, placed_end = extent.end, offset + footprint_bytes(extent.nbytes)
    return tuple(_copy(tuple(group), extents, placed) for group in groups)


def _copy(names: tuple[str, ...], extents: Mapping[str, Extent], placed: Mapping[str, Placement]) -> Copy:
    source = extents[names[0]].offset
    ends = tuple(extents[name].offset + extents[name].nbytes - source for name in names)
    return Copy(source, placed[names[0]].offset, ends[-1], names, ends)
