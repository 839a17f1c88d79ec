"""Which layers could share one weight: groups, the pairing behind them, and the bytes that sharing all would save.

Repeated signatures are paired by aligning two networks' sequences of signatures (Needleman and Wunsch 1970): as many
layers as possible match in order, and ties are decided by the similarity of the weights, if there are weights, and by
the position in the network. So a backbone in a detector is paired layer for layer with the same backbone in a
classifier. Layers that no order matches are paired in sequence, so the layer-sharing bound is always reached.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

import numpy as np

from gemel.models.sharing.layers import Layer, Signature

Pairing = Literal["aligned", "order"]
Likeness = Callable[[Layer, Layer], float]
"""How alike the weights of two layers of one signature are, 0 to 1."""
ROLE_WEIGHT = 0.1
PLACE_WEIGHT = 0.1
"""What the same role (the name within its block, stride and padding) and the same place are worth beside a match."""


@dataclass(frozen=True)
class Group:
    """Layers of one signature, at most one from each query, that could share one weight of `bytes`.

    `paired` says how its members were chosen: "only" (no model has the signature twice), "order", "position" or
    "likeness".
    """

    signature: str
    members: tuple[tuple[str, str], ...]
    bytes: int
    paired: str = "only"

    @property
    def saved_bytes(self) -> int:
        """What sharing the whole group saves."""
        return self.bytes * (len(self.members) - 1)


@dataclass
class _Slot:
    """A group in the making; `first` is the member by which likeness is judged."""

    first: Layer
    members: list[Layer] = field(default_factory=list)
    queries: set[str] = field(default_factory=set)

    def add(self, layer: Layer) -> None:
        self.members.append(layer)
        self.queries.add(layer.query)


def groups(
    layers: Iterable[Layer],
    signature: Signature = "wide",
    pairing: Pairing = "aligned",
    likeness: Likeness | None = None,
) -> list[Group]:
    """All groups of two members or more, in descending order of bytes saved.

    With `pairing` "order" (the paper's) a model's k-th occurrence of a signature meets the k-th of the others.
    """
    by_query: dict[str, list[Layer]] = defaultdict(list)
    for layer in layers:
        if not layer.head:
            by_query[layer.query].append(layer)
    slots = (
        _in_order(by_query, signature)
        if pairing == "order"
        else _align_queries(by_query, signature, likeness)
    )
    counts = [Counter(layer.signature(signature) for layer in rows) for rows in by_query.values()]
    repeated = {name for of_query in counts for name, count in of_query.items() if count > 1}
    how = "order" if pairing == "order" else "likeness" if likeness else "position"
    queries = {query: index for index, query in enumerate(by_query)}
    groups_found = []
    for slot in slots:
        if len(slot.members) > 1:
            name = slot.first.signature(signature)
            members = sorted(slot.members, key=lambda layer: queries[layer.query])
            paths = tuple((layer.query, layer.path) for layer in members)
            groups_found.append(
                Group(name, paths, slot.first.bytes, how if name in repeated else "only")
            )
    return sorted(
        groups_found, key=lambda group: (-group.saved_bytes, group.signature, group.members)
    )


def ceiling_bytes(layers: Iterable[Layer], signature: Signature = "wide") -> int:
    """Bytes saved if every group were shared: sum over signatures of bytes x (sum of n_q - max of n_q)."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    size: dict[str, int] = {}
    for layer in layers:
        if not layer.head:
            name = layer.signature(signature)
            counts[name][layer.query] += 1
            size[name] = layer.bytes
    return sum(size[name] * (n.total() - max(n.values())) for name, n in counts.items())


def _in_order(by_query: dict[str, list[Layer]], signature: Signature) -> list[_Slot]:
    slots: dict[tuple[str, int], _Slot] = {}
    for rows in by_query.values():
        seen: Counter[str] = Counter()
        for layer in rows:
            name = layer.signature(signature)
            slots.setdefault((name, seen[name]), _Slot(layer)).add(layer)
            seen[name] += 1
    return list(slots.values())


def _align_queries(
    by_query: dict[str, list[Layer]], signature: Signature, likeness: Likeness | None
) -> list[_Slot]:
    """Slots in the order of one sequence to which all networks are aligned, the longest network first."""
    names: dict[str, int] = {}
    for layer in chain.from_iterable(by_query.values()):
        names.setdefault(layer.signature(signature), len(names))
    sequence: list[_Slot] = []
    slots_of_network: dict[tuple[int, ...], list[_Slot]] = {}
    for query in sorted(by_query, key=lambda query: -len(by_query[query])):
        rows = by_query[query]
        word = tuple(names[layer.signature(signature)] for layer in rows)
        if likeness is None and word in slots_of_network:
            # The same network again: its layers go where its twin's went.
            taken = slots_of_network[word]
        else:
            taken = _assign_slots(rows, word, sequence, names, signature, likeness)
            slots_of_network[word] = taken
        for layer, slot in zip(rows, taken):
            slot.add(layer)
    return sequence


def _assign_slots(
    rows: list[Layer],
    word: tuple[int, ...],
    sequence: list[_Slot],
    names: dict[str, int],
    signature: Signature,
    likeness: Likeness | None,
) -> list[_Slot]:
    """The slot of each layer: the one it is aligned with, else one left over, else a new one put into the sequence."""
    columns = np.array(
        [names[slot.first.signature(signature)] for slot in sequence], dtype=np.int64
    )
    match = _alignment(rows, word, sequence, columns, likeness)
    free: dict[int, list[int]] = defaultdict(list)
    for column in sorted(set(range(len(sequence))) - set(match.values())):
        free[int(columns[column])].append(column)
    for row, name in enumerate(word):
        if row not in match and free[name]:
            match[row] = free[name].pop(0)
    taken = []
    new = []
    at = -1
    for row, layer in enumerate(rows):
        if row in match:
            at = max(at, match[row])
            taken.append(sequence[match[row]])
        else:
            taken.append(_Slot(layer))
            new.append((at, taken[-1]))
    for after, slot in reversed(new):
        sequence.insert(after + 1, slot)
    return taken


def _role(layer: Layer) -> str:
    return f"{layer.path.rpartition('.')[2]} {layer.strict}"


def _alignment(
    rows: list[Layer],
    word: tuple[int, ...],
    sequence: list[_Slot],
    columns: np.ndarray,
    likeness: Likeness | None,
) -> dict[int, int]:
    """Row -> column of the best alignment in order; a match is worth 1, its likeness, a little for role and place."""
    if not rows or not sequence:
        return {}
    places = np.array([slot.first.position for slot in sequence])
    roles = np.array([_role(slot.first) for slot in sequence])
    best = np.zeros((len(rows) + 1, len(sequence) + 1))
    worth = []
    for row, layer in enumerate(rows):
        equal = columns == word[row]
        value = np.where(equal, 1 + PLACE_WEIGHT * (1 - np.abs(places - layer.position)), -1.0)
        if likeness is not None:
            for column in np.flatnonzero(equal):
                value[column] += likeness(layer, sequence[column].first)
        value += ROLE_WEIGHT * (roles == _role(layer))
        worth.append(value)
        step = np.maximum(best[row, 1:], np.where(equal, best[row, :-1] + value, 0.0))
        best[row + 1, 1:] = np.maximum.accumulate(step)
    match: dict[int, int] = {}
    row = len(rows)
    column = len(sequence)
    while row and column:
        value_here = best[row, column]
        if value_here == best[row, column - 1]:
            column -= 1
        elif value_here == best[row - 1, column]:
            row -= 1
        else:
            row = row - 1
            column = column - 1
            match[row] = column
    return match
