"""Which queries of an opened bundle cannot be trusted, because bytes of their tensors have changed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from models.bundle import Bundle
from models.bundle.container import Entry, tensor_name

# hashlib lets go of the interpreter meanwhile.
HASH_THREADS = 2


def damaged_queries(bundle: Bundle) -> dict[str, str]:
    """Query id -> what is damaged, of every query with a tensor whose bytes do not match its name.

    Every tensor is rehashed once, when the box starts (the bundle is read for that anyway), so that no load has to:
    hashing runs at a few times less than the rate of copying.
    """
    entries = [entry for entry in bundle.header.entries.values() if not entry.is_pad]

    def sound(entry: Entry) -> bool:
        begin = bundle.header.data_start + entry.begin
        with memoryview(bundle.mapping) as view, view[begin : begin + entry.nbytes] as data:
            return tensor_name(entry.dtype, entry.shape, data) == entry.name

    with ThreadPoolExecutor(HASH_THREADS) as pool:
        damaged = {entry.name for entry, whole in zip(entries, pool.map(sound, entries)) if not whole}
    reasons = {}
    for query in bundle.queries:
        hit = [(path, name) for path, name in query.places().items() if name in damaged]
        if hit:
            path, name = hit[0]
            more = f" and {len(hit) - 1} more" if len(hit) > 1 else ""
            reasons[query.id] = f"tensor {name[:12]} ({path}){more} does not match its content hash"
    return reasons
