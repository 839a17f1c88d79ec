"""Checks every byte of a bundle without importing anything that its manifest names."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from models.bundle.checks import (
    architecture_problems,
    layout_problems,
    manifest_problems,
    order_problems,
    scale_problems,
)
from models.bundle.container import ALIGNMENT_BYTES, Fault, Header, tensor_name
from models.bundle.manifest import Manifest
from models.bundle.reader import architecture, map_file, parse
from models.errors import BundleError

MAX_PROBLEMS = 100


def verify_bundle(path: str | Path, factories: Collection[str] = ()) -> list[str]:
    """Every problem of a bundle, one line each (at most 100); an empty list means that it is sound.

    Rehashes all tensors and gap fillers, and compares the manifest with the header and with the zoo's
    architectures, which are built on the meta device. A model outside the zoo is a problem unless `factories`
    lists it; its architecture is then not checked, because nothing is imported. Raises InputError when the
    file cannot be read.
    """
    path = Path(path)
    try:
        mapping = map_file(path)
        header, manifest = parse(mapping)
    except BundleError as error:
        return [error.fault]
    except Fault as fault:
        return [str(fault)]
    problems: list[str] = []
    with memoryview(mapping) as view:
        for problem in _problems(path, view, header, manifest, factories):
            problems.append(problem)
            if len(problems) == MAX_PROBLEMS:
                break
    return problems


def _problems(
    path: Path, view: memoryview, header: Header, manifest: Manifest, factories: Collection[str]
) -> Iterator[str]:
    yield from layout_problems(header)
    lies = list(manifest_problems(manifest, header))
    yield from lies
    if not lies:
        yield from scale_problems(manifest, header, view)
    yield from order_problems(manifest, header)
    if not any("is missing" in lie for lie in lies):
        yield from _architecture_problems(path, header, manifest, factories)
    yield from _content_problems(view, header)


def _architecture_problems(path: Path, header: Header, manifest: Manifest, factories: Collection[str]) -> Iterator[str]:
    from models.zoo import is_zoo_name

    for query in manifest.queries:
        if query.model in factories and not is_zoo_name(query.model):
            continue
        try:
            model = architecture(query, (), path)
        except BundleError as error:
            yield f"{error.fault}; {error.remedy}"
            continue
        yield from architecture_problems(query, model, header.entries)


def _content_problems(view: memoryview, header: Header) -> Iterator[str]:
    """Rehash every tensor; gap fillers must be zero."""
    zeros = bytes(ALIGNMENT_BYTES)
    for name, entry in header.entries.items():
        with view[header.data_start + entry.begin : header.data_start + entry.end] as data:
            if entry.is_pad:
                if bytes(data[:ALIGNMENT_BYTES]) != zeros[: entry.nbytes]:
                    yield f"gap filler {name[:80]} is damaged"
            elif tensor_name(entry.dtype, entry.shape, data) != name:
                yield f"tensor {name[:80]} is damaged: its bytes do not match its name"
