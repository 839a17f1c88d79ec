"""Which tensors of a bundle are what their names say, and which queries cannot be trusted where some are not."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor

from models.bundle import Bundle
from models.bundle.format import CHUNK_BYTES, Entry, tensor_hash

# hashlib lets go of the interpreter meanwhile.
HASH_THREADS = 2


def tensors_of(bundle: Bundle) -> list[Entry]:
    """All that can be hashed, in file order."""
    return [entry for entry in bundle.header.entries.values() if not entry.is_pad]


def is_sound(bundle: Bundle, entry: Entry, paced: Callable[[int], object] = lambda _: None) -> bool:
    """Whether a tensor's bytes match its name; those that are gone do not. `paced` hears of every piece read."""
    digest, room = tensor_hash(entry.dtype, entry.shape), memoryview(bytearray(min(CHUNK_BYTES, entry.nbytes)))
    start = bundle.header.data_start + entry.begin
    try:
        for at in range(0, entry.nbytes, CHUNK_BYTES):
            piece = room[: min(CHUNK_BYTES, entry.nbytes - at)]
            bundle.file.read_unproven(start + at, piece)
            digest.update(piece)
            paced(len(piece))
    except OSError:
        return False
    return digest.hexdigest() == entry.name


def damaged_tensors(bundle: Bundle) -> frozenset[str]:
    """The tensors whose bytes do not match their names.

    Every tensor is rehashed once, when the box starts (the bundle is read for that anyway), so that no load has to:
    hashing runs at a few times less than the rate of copying.
    """
    entries = tensors_of(bundle)
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        sound = pool.map(lambda entry: is_sound(bundle, entry), entries)
        return frozenset(entry.name for entry, whole in zip(entries, sound) if not whole)


def damaged_queries(bundle: Bundle, damaged: Collection[str]) -> dict[str, str]:
    """Query id -> what is damaged, of every query with one of these tensors."""
    reasons = {}
    for query in bundle.queries:
        hit = [(path, name) for path, name in query.places().items() if name in damaged]
        if hit:
            path, name = hit[0]
            more = f" and {len(hit) - 1} more" if len(hit) > 1 else ""
            reasons[query.id] = f"tensor {name[:12]} ({path}){more} does not match its content hash"
    return reasons
