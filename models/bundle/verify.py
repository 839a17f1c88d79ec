"""Checks every byte of a bundle; nothing that its manifest names is imported unless the caller allows it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path

from models.bundle.checks import (
    architecture_problems,
    layout_problems,
    manifest_problems,
    order_problems,
    scale_problems,
    value_problems,
)
from models.bundle.format import ALIGNMENT_BYTES, Header, tensor_name
from models.bundle.manifest import Manifest, StoredTensor
from models.bundle.model_spec import architecture, load_model_spec
from models.bundle.reader import map_file, parse
from models.errors import BundleError
from models.io import ParseError

MAX_PROBLEMS = 100


def verify_bundle(path: str | Path, factories: Collection[str] = (), folder: Path | None = None) -> list[str]:
    """Every problem of a bundle, one line each (at most 100); an empty list means that it is sound.

    Rehashes all tensors and gap fillers, and compares the manifest with the header and with the architectures, built on
    the meta device. The architecture of a model outside the zoo is checked only if `factories` lists it
    (`list_unchecked` names the others); then it is imported, from `folder` or Python's path. Raises InputError when the
    file cannot be read.
    """
    path = Path(path)
    try:
        mapping = map_file(path)
        header, manifest = parse(mapping)
    except BundleError as error:
        return [error.problem]
    except ParseError as error:
        return [str(error)]
    with memoryview(mapping) as view:
        architectures = _architecture_problems(path, factories, folder, header, manifest)
        return list(islice(_problems(view, header, manifest, architectures), MAX_PROBLEMS))


def list_unchecked(path: str | Path, factories: Collection[str] = ()) -> list[str]:
    """The models whose architectures `verify_bundle` does not check, one line each; none where it cannot be read."""
    try:
        _, manifest = parse(map_file(Path(path)))
    except (BundleError, ParseError):
        return []
    by_model: dict[str, list[str]] = {}
    for query in manifest.queries:
        if ":" in query.model and query.model not in factories:
            by_model.setdefault(query.model, []).append(query.id)
    return [
        f"{'query' if len(queries) == 1 else 'queries'} {', '.join(queries)}: the code of '{model}' was not run, so "
        f"whether the tensors fit it is not checked; allow it with --factory {model}"
        for model, queries in by_model.items()
    ]


def _problems(view: memoryview, header: Header, manifest: Manifest, architectures: Iterator[str]) -> Iterator[str]:
    yield from layout_problems(header)
    contradictions = list(manifest_problems(manifest, header))
    yield from contradictions
    yield from order_problems(manifest, header)
    if not any("is missing" in problem for problem in contradictions):
        yield from architectures
    stored: dict[str, set[StoredTensor]] = {}
    if not contradictions:
        yield from scale_problems(manifest, header, view)
        for query in manifest.queries:
            for key, packed in query.stored.items():
                stored.setdefault(query.tensors[key], set()).add(packed)
    yield from _content_problems(view, header, stored)


def _architecture_problems(
    path: Path, factories: Collection[str], folder: Path | None, header: Header, manifest: Manifest
) -> Iterator[str]:
    for query in manifest.queries:
        if ":" in query.model and query.model not in factories:
            continue
        try:
            spec = load_model_spec(query, partial(architecture, query, factories, path, folder))
        except BundleError as error:
            yield f"{error.problem}; {error.hint}"
            continue
        yield from architecture_problems(query, spec, header.entries)


def _content_problems(
    view: memoryview, header: Header, stored: Mapping[str, Collection[StoredTensor]]
) -> Iterator[str]:
    """Rehash every tensor and check its values; gap fillers must be zero. `stored`: how queries use it packed."""
    zeros = bytes(ALIGNMENT_BYTES)
    for name, entry in header.entries.items():
        with view[header.data_start + entry.begin : header.data_start + entry.end] as data:
            if entry.is_pad:
                if bytes(data[:ALIGNMENT_BYTES]) != zeros[: entry.nbytes]:
                    yield f"gap filler {name[:80]} is damaged"
            elif tensor_name(entry.dtype, entry.shape, data) != name:
                yield f"tensor {name[:80]} is damaged: its bytes do not match its name"
            else:
                yield from value_problems(entry, stored.get(name, ()), data)
