"""Writes a bundle with some of its queries replaced by those of other bundles."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from models.bundle.format import encode_header, place
from models.bundle.manifest import FORMAT, MANIFEST_KEY, Manifest, count_bytes, shared_of
from models.bundle.reader import Bundle
from models.bundle.writer import load_order
from models.errors import InputError
from models.io import check_output, open_atomic


def write_substituted(path: str | Path, bundle: Bundle, others: Mapping[str, Bundle], overwrite: bool = False) -> None:
    """Write the bundle with each of these queries as it is in another bundle.

    One tensor is in memory at a time. Raises InputError, with nothing written, where the path exists or cannot be
    written, or bytes of one of the bundles are gone or no longer what they were.
    """
    path = check_output(path, overwrite)
    homes = {query.id: others.get(query.id, bundle) for query in bundle.queries}
    queries = tuple(home.query(query) for query, home in homes.items())
    holders = {name: homes[query.id] for query in queries for name in query.places().values()}
    found = {name: holder.header.entries[name] for name, holder in holders.items()}
    sizes = [(name, one.dtype, one.shape, one.nbytes) for name in load_order(queries) for one in [found[name]]]
    old = bundle.manifest
    counts = count_bytes(queries, found, old.bytes.ceiling)
    manifest = Manifest(FORMAT, old.workload, old.method, counts, queries, shared_of(queries))
    entries = place(sizes)
    with open_atomic(path, overwrite) as file:
        file.write(encode_header(entries, {MANIFEST_KEY: manifest.to_json()}))
        for one in entries:
            file.write(bytes(one.nbytes) if one.is_pad else _bytes_of(holders[one.name], one.name))


def _bytes_of(bundle: Bundle, name: str) -> memoryview:
    """A tensor as stored in the file."""
    import torch

    try:
        return memoryview(bundle.read(name).reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    except OSError as error:
        raise InputError(bundle.path, str(error.strerror), "copy it again, under another name") from error
