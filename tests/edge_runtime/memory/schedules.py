"""Random schedules over merged queries, played on a bookkeeper with fake bytes: what must hold is checked."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import pairwise

from gemel.edge_runtime.memory.allocator import (
    Admission,
    BlockedError,
    Extent,
    NoSpaceError,
    Residency,
    footprint_bytes,
)

KIB = 1024


@dataclass
class RandomSchedule:
    """Queries that share tensors, a bundle of fake bytes, a memory, and a budget from too small to too large."""

    random: random.Random
    extents: dict[str, Extent] = field(default_factory=dict)
    queries: dict[str, tuple[str, ...]] = field(default_factory=dict)
    workspaces: dict[str, int] = field(default_factory=dict)
    running: list[str] = field(default_factory=list)
    moved: int = 0
    refused: int = 0
    blocked: int = 0

    def __post_init__(self) -> None:
        at = 0
        for index in range(self.random.randint(1, 12)):
            extent = Extent(at, self.random.choice([0, 1, 512, 513, 1024, 3000, 6000, 9000, 12_000]))
            self.extents[f"t{index}"] = extent
            at = extent.end + self.random.choice([0, 0, 0, 512])
        self.stored = bytes(self.random.getrandbits(8) for _ in range(64)) * (at // 64 + 1)
        names = list(self.extents)
        for index in range(self.random.randint(1, 5)):
            needed = self.random.sample(names, self.random.randint(1, min(4, len(names))))
            self.queries[f"q{index}"] = tuple(sorted(needed, key=names.index))
            self.workspaces[f"q{index}"] = self.random.choice([0, 0, 700, 4096])
        alone = max(self.weights(self.queries[query]) + self.workspaces[query] for query in self.queries)
        self.budget = max(0, alone + self.random.choice([-512, 0, 0, 512, 4096, 20_000]))
        capacity = self.budget - min(self.workspaces.values())
        self.residency = Residency(max(0, capacity), self.extents, self.budget)
        self.memory = bytearray(self.residency.capacity_bytes)

    def weights(self, names: tuple[str, ...] | frozenset[str]) -> int:
        return sum(footprint_bytes(self.extents[name].nbytes) for name in names)

    def play(self, steps: int) -> None:
        for _ in range(steps):
            query = self.random.choice(list(self.queries))
            step = self.random.choice([self.run, self.run, self.prefetch, self.end, self.evict])
            step(query)
            self.check()

    def run(self, query: str) -> None:
        """Make a query resident, evicting as a schedule does: as few as its free choice of order allows."""
        if query in self.running:
            return
        names, workspace, residency = self.queries[query], self.workspaces[query], self.residency
        missing = residency.missing(names)
        held = {name for other in self.running for name in self.queries[other]}
        free = sorted(residency.resident - held - set(names))
        self.random.shuffle(free)
        reserved = residency.workspace_bytes + workspace

        def excess(resident: frozenset[str] | set[str]) -> int:
            weights = self.weights(frozenset(resident) | set(missing))
            return max(weights + reserved - self.budget, weights - residency.capacity_bytes)

        stay = set(residency.resident)
        evict = []
        while free and excess(stay - set(residency.prefetched) | set(names) & stay) > 0:
            evict.append(free.pop())
            stay.discard(evict[-1])
        fits = excess(stay - (set(residency.prefetched) - set(names))) <= 0
        held_at = {name: residency.placed[name] for name in held}
        before = residency.resident
        try:
            admission = residency.admit(names, workspace, evict)
        except BlockedError:
            assert fits and self.running, "nothing but a running query may stand in the way of what fits"
            assert residency.resident == before
            self.blocked += 1
            while self.running:
                self.end(self.running[0])
            held_at.clear()
            admission = residency.admit(names, workspace, evict)
        except NoSpaceError:
            assert not fits and residency.resident == before
            self.refused += 1
            return
        assert fits
        assert set(missing) == {name for name in names if name not in before}
        copied = self.carry_out(admission)
        assert copied == sum(self.extents[name].nbytes for name in missing), "exactly needed minus resident"
        assert all(residency.placed[name] == placed for name, placed in held_at.items())
        residency.hold(names, workspace)
        self.running.append(query)

    def prefetch(self, query: str) -> None:
        names, before = self.queries[query], self.residency.resident
        try:
            admission = self.residency.admit_prefetch(names)
        except NoSpaceError:
            assert self.residency.resident == before
            return
        assert not admission.moves and not admission.cancelled
        copied = self.carry_out(admission)
        assert copied == sum(self.extents[name].nbytes for name in names if name not in before)
        assert {name for name in names if name not in before} <= set(self.residency.prefetched)

    def end(self, query: str) -> None:
        if query in self.running:
            self.running.remove(query)
            self.residency.release(self.queries[query], self.workspaces[query])

    def evict(self, query: str) -> None:
        names = [
            name for name in self.queries[query] if name in self.residency.resident and not self.residency.holds(name)
        ]
        self.residency.evict(names)

    def carry_out(self, admission: Admission) -> int:
        """Do to the memory what the bookkeeper says; returns the stored bytes of the tensors copied."""
        for move in admission.moves:
            assert move.target < move.source
            self.memory[move.target : move.target + move.nbytes] = self.memory[move.source : move.source + move.nbytes]
        for copy in admission.copies:
            assert copy.target + copy.nbytes <= len(self.memory)
            stored = self.stored[copy.source : copy.source + copy.nbytes]
            self.memory[copy.target : copy.target + copy.nbytes] = stored
        self.moved += sum(move.nbytes for move in admission.moves)
        return sum(self.extents[name].nbytes for copy in admission.copies for name in copy.names)

    def check(self) -> None:
        residency = self.residency
        assert residency.resident_bytes == self.weights(residency.resident)
        assert residency.resident_bytes + sum(self.workspaces[query] for query in self.running) <= max(self.budget, 0)
        placed = sorted(
            (residency.placed[name].offset, residency.placed[name].end)
            for name in residency.resident
            if self.extents[name].nbytes
        )
        edges = sorted([*placed, *residency.free])
        assert [start for start, _ in edges] == [0, *(end for _, end in edges)][: len(edges)]
        assert not edges or edges[-1][1] == residency.capacity_bytes
        assert all(a[1] < b[0] for a, b in pairwise(residency.free)), "holes are merged"
        for name in residency.resident:
            at, extent = residency.placed[name], self.extents[name]
            assert at.offset % 512 == 0
            stored = self.stored[extent.offset : extent.offset + extent.nbytes]
            assert self.memory[at.offset : at.offset + at.nbytes] == stored, f"{name} reads as stored"
