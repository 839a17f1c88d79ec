"""Residency: which tensors lie where in the arena, by content name. Bookkeeping only; `arena.py` moves the bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from edge_runtime.memory.allocator import (
    ALIGNMENT_BYTES,
    Admission,
    ArenaSpan,
    Extent,
    FreeList,
    NoSpaceError,
    check_evictable,
    footprint_bytes,
    plan_admission,
    plan_prefetch,
)


class Residency:
    """Tensors by content name in one address range, at multiples of 512 bytes.

    A tensor is resident once, however many queries need it. Queries `hold` the tensors they run with: these are
    neither evicted nor moved. Prefetched tensors belong to no query until they are admitted or held, and are cancelled
    for whatever is needed. `capacity_bytes` is the size of the range; footprints in it and the workspaces of what runs
    together never exceed `budget_bytes` (the capacity, if none is given). `extents` says where every tensor is stored.
    Eviction only forgets.
    """

    def __init__(
        self,
        capacity_bytes: int,
        extents: Mapping[str, Extent],
        budget_bytes: int | None = None,
    ) -> None:
        self.extents = extents
        self.footprints = {name: footprint_bytes(extent.nbytes) for name, extent in extents.items()}
        self._holds: Counter[str] = Counter()
        self.resize(capacity_bytes, budget_bytes)

    def resize(self, capacity_bytes: int, budget_bytes: int | None) -> None:
        """Forget everything and start over in a range of this size."""
        if capacity_bytes < 0:
            raise ValueError(f"an arena cannot have {capacity_bytes} bytes")
        self.capacity_bytes = capacity_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        self.budget_bytes = self.capacity_bytes if budget_bytes is None else budget_bytes
        self.resident_bytes = self.workspace_bytes = 0
        self.placed: dict[str, ArenaSpan] = {}
        self._holds.clear()
        self._prefetched: dict[str, None] = {}
        self._free = FreeList.between((), self.capacity_bytes)

    def adopt(self, kept: Mapping[str, ArenaSpan]) -> None:
        """Enter the tensors `kept`, which are at these places already, into an emptied range."""
        self.placed = dict(kept)
        self.resident_bytes = sum(map(self.footprints.__getitem__, kept))
        self._free = FreeList.between(kept.values(), self.capacity_bytes)

    @property
    def resident(self) -> frozenset[str]:
        """The names of all resident tensors, prefetched ones included."""
        return frozenset(self.placed)

    @property
    def prefetched(self) -> tuple[str, ...]:
        """The tensors that no query has asked for yet, in the order they came."""
        return tuple(self._prefetched)

    @property
    def free(self) -> tuple[tuple[int, int], ...]:
        """The free spans (start, end) of the range."""
        return tuple(self._free.spans)

    def exceeds(self, workspace_bytes: int) -> bool:
        """Whether the whole range, with this workspace and those of what runs already, exceeds the budget."""
        return self.capacity_bytes + self.workspace_bytes + workspace_bytes > self.budget_bytes

    def __contains__(self, name: str) -> bool:
        """Whether a tensor is resident."""
        return name in self.placed

    def placement(self, name: str) -> ArenaSpan:
        """Where a resident tensor lies; KeyError when it is not resident."""
        return self.placed[name]

    def missing(self, names: Iterable[str]) -> tuple[str, ...]:
        """Those of the names that are not resident, each once, in the order given."""
        return tuple(name for name in dict.fromkeys(names) if name not in self.placed)

    def holds(self, name: str) -> int:
        """How many queries hold a tensor."""
        return self._holds[name]

    def admit(self, names: Iterable[str], workspace_bytes: int = 0, evict: Collection[str] = ()) -> Admission:
        """Forget `evict` and give every one of the names that is not resident a place, all or nothing.

        Afterwards `workspace_bytes` are free beside what runs already. Raises what `plan_admission` raises.
        """
        needed = dict.fromkeys(names)
        admission = plan_admission(self, needed, workspace_bytes, evict)
        self._apply(admission)
        self._clear_prefetched(needed)
        return admission

    def admit_prefetch(self, names: Iterable[str], evict: Collection[str] = ()) -> Admission:
        """The same for tensors that no query needs yet: they count as prefetched, and get only what is free.

        Raises what `plan_prefetch` raises.
        """
        admission = plan_prefetch(self, dict.fromkeys(names), evict)
        self._apply(admission)
        self._prefetched.update(dict.fromkeys(admission.placed))
        return admission

    def evict(self, names: Iterable[str]) -> None:
        """Forget tensors. ValueError, with nothing forgotten, when one is held; KeyError when one is not resident."""
        names = tuple(names)
        check_evictable(self, names)
        starts = [(self.placed[name].offset, self.footprints[name]) for name in names]
        self._free.add((start, start + size) for start, size in starts)
        self._forget(names)

    def hold(self, names: Iterable[str], workspace_bytes: int = 0) -> None:
        """Count a query that runs with these tensors and this workspace; they are no longer prefetched.

        KeyError when one is not resident and NoSpaceError when the budget would be exceeded; nothing is counted then.
        """
        names = tuple(names)
        for name in names:
            self.placed[name]
        if self.resident_bytes + self.workspace_bytes + workspace_bytes > self.budget_bytes:
            raise NoSpaceError(f"{workspace_bytes} bytes of workspace pass the budget of {self.budget_bytes}")
        self._holds.update(names)
        self.workspace_bytes += workspace_bytes
        self._clear_prefetched(names)

    def release(self, names: Iterable[str], workspace_bytes: int = 0) -> None:
        """Take back one `hold` of the same names and workspace."""
        holds = self._holds
        self.workspace_bytes -= workspace_bytes
        for name in names:
            if holds[name] < 1:
                raise ValueError(f"{name} is not held")
            holds[name] -= 1

    def _apply(self, admission: Admission) -> None:
        if admission.free is None:
            return
        self._forget((*admission.evicted, *admission.cancelled))
        self._free = admission.free
        self.placed.update((move.name, ArenaSpan(move.target, move.nbytes)) for move in admission.moves)
        self.placed.update(admission.placed)
        self.resident_bytes += sum(map(self.footprints.__getitem__, admission.placed))

    def _forget(self, names: Iterable[str]) -> None:
        for name in names:
            self.resident_bytes -= self.footprints[name]
            del self.placed[name]
            self._prefetched.pop(name, None)

    def _clear_prefetched(self, names: Iterable[str]) -> None:
        for name in names if self._prefetched else ():
            self._prefetched.pop(name, None)
