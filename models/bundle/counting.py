"""What a bundle's bytes are: those of its unique tensors as stored, and those that its originals would take."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from models.bundle.container import Entry
from models.bundle.dtypes import ITEM_BYTES
from models.bundle.manifest import BundleQuery, ByteCounts
from models.parts.terms import FACTORS, LOW_RANK, WIDE_CODE


def count_bytes(queries: Iterable[BundleQuery], entries: Mapping[str, Entry], ceiling_bytes: int) -> ByteCounts:
    """before = the sum over queries of `original_bytes`; after = all unique tensors, residuals and scales included."""
    before = 0
    unique: set[str] = set()
    for query in queries:
        before += original_bytes(query, entries)
        unique.update(query.places().values())
    return ByteCounts(before, sum(entries[name].nbytes for name in unique), ceiling_bytes)


def original_bytes(query: BundleQuery, entries: Mapping[str, Entry]) -> int:
    """Bytes of a query's original: every place of its plain architecture has a tensor of its own there, stored wide.

    However the bundle came by what stands at a place: shared within the model, or a layer as two factors.
    """
    total = sum(
        math.prod(wide_shape(query, key, entries[name])) * ITEM_BYTES[wide_code(query, key, entries[name])]
        for key, name in query.tensors.items()
    )
    for path in query.model_args.get(LOW_RANK, {}):  # type: ignore[union-attr]
        keys = [f"{path}.{factor}.weight" for factor in FACTORS]
        found = [entries.get(query.tensors.get(key, "")) for key in keys]
        a, b = (() if entry is None else wide_shape(query, key, entry) for key, entry in zip(keys, found, strict=True))
        if a and b and found[0] is not None:
            factors = math.prod(a) + math.prod(b)
            total += (b[0] * math.prod(a[1:]) - factors) * ITEM_BYTES[wide_code(query, keys[0], found[0])]
    return total


def wide_code(query: BundleQuery, key: str, entry: Entry) -> str:
    """The dtype (its code) in which the tensor at a state_dict key is used, however it is stored."""
    return WIDE_CODE if key in query.stored else entry.dtype


def wide_shape(query: BundleQuery, key: str, entry: Entry) -> tuple[int, ...]:
    """The shape in which the tensor at a state_dict key is used, however it is stored."""
    own = query.stored.get(key)
    return entry.shape if own is None or own.shape is None else own.shape
