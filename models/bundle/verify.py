"""Checks every byte of a bundle; nothing that its manifest names is imported unless the caller allows it."""

from __future__ import annotations

import mmap
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np

from gemel.models.bundle.checks import architecture_problems, manifest_problems, scale_problems
from gemel.models.bundle.format import CHUNK_BYTES, ITEM_BYTES, Entry, Header, tensor_name
from gemel.models.bundle.manifest import Manifest, graph_names
from gemel.models.bundle.model_spec import architecture, load_model_spec
from gemel.models.bundle.query_documents import document_problems
from gemel.models.bundle.reader import map_file, parse
from gemel.models.bundle.writer import load_order
from gemel.models.errors import BundleError
from gemel.models.files.documents import ParseError
from gemel.models.files.extras import MERGE, is_installed

MAX_PROBLEMS = 100
_EXPONENTS = {"F64": 0x7FF0 << 48, "F32": 0x7F80 << 16, "F16": 0x7C00, "BF16": 0x7F80}
"""The exponent bits that are all set in infinity and NaN."""


def verify_bundle(
    path: str | Path, factories: Collection[str] = (), folder: Path | None = None
) -> list[str]:
    """Every problem of a bundle, one line each (at most 100); an empty list means that it is sound.

    Rehashes all tensors and gap fillers, and compares the manifest with the header, with the documents of networks and,
    where torch is installed, with the architectures, built on the meta device. The architecture of a model outside the
    zoo is checked only if `factories` lists it (`list_unchecked` names the others); then it is imported, from `folder`
    or Python's path. Raises InputError when the
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
    problems = manifest_problems(manifest, header)
    if not any("is missing" in problem for problem in problems):
        if not problems:
            problems += islice(scale_problems(manifest, header, mapping), MAX_PROBLEMS)
        documents = {
            name: _bytes_of(name, header, mapping) for name in graph_names(manifest.queries)
        }
        problems += islice(_document_problems(manifest, header, documents), MAX_PROBLEMS)
        architecture_faults = _architecture_problems(
            path, factories, folder, header, manifest, documents
        )
        problems += islice(architecture_faults, MAX_PROBLEMS)
        if not problems and [entry.name for entry in header.tensors] != list(
            load_order(manifest.queries)
        ):
            problems.append(
                "the tensors are not in load order, so that a load would be many small copies"
            )
    return [*problems, *islice(_content_problems(header, mapping), MAX_PROBLEMS)][:MAX_PROBLEMS]


def list_unchecked(path: str | Path, factories: Collection[str] = ()) -> list[str]:
    """The models whose tensors `verify_bundle` compares with no network, one line each; none where it cannot be read.

    Those are networks that the bundle does not hold, and that are a user's code or, without torch, of any kind.
    """
    try:
        _, manifest = parse(map_file(Path(path)))
    except (BundleError, ParseError):
        return []
    by_model: dict[str, list[str]] = {}
    can_build = is_installed("torchvision")
    for query in manifest.queries:
        is_built = can_build and (":" not in query.model or query.model in factories)
        if query.network_document is None and not is_built:
            by_model.setdefault(query.model, []).append(query.id)
    return [_describe_unchecked(model, queries, can_build) for model, queries in by_model.items()]


def _describe_unchecked(model: str, queries: Sequence[str], can_build: bool) -> str:
    names = f"{'query' if len(queries) == 1 else 'queries'} {', '.join(queries)}"
    if not can_build:
        fault = "the bundle does not hold the network, so whether the tensors fit it is not checked"
        return f"{names}: {fault}; pip install {MERGE}"
    fault = f"the code of '{model}' was not run, so whether the tensors fit it is not checked"
    return f"{names}: {fault}; allow it with --factory {model}"


def _architecture_problems(
    path: Path,
    factories: Collection[str],
    folder: Path | None,
    header: Header,
    manifest: Manifest,
    documents: Mapping[str, bytes],
) -> Iterator[str]:
    if not is_installed("torchvision"):
        return
    for query in manifest.queries:
        if ":" in query.model and query.model not in factories:
            continue
        document = None if query.graph is None else documents[query.graph]
        try:
            spec = load_model_spec(
                query, partial(architecture, query, factories, path, folder, document)
            )
        except BundleError as error:
            yield f"{error.problem}; {error.hint}"
            continue
        yield from architecture_problems(query, spec, header.entries)


def _document_problems(
    manifest: Manifest, header: Header, documents: Mapping[str, bytes]
) -> Iterator[str]:
    for query in manifest.queries:
        # A network that came as a graph is checked when it is built, where torch is installed.
        name = query.document if is_installed("torchvision") else query.network_document
        if name is not None:
            yield from document_problems(query, documents[name], header.entries)


def _bytes_of(name: str, header: Header, mapping: mmap.mmap) -> bytes:
    entry = header.entries[name]
    return mapping[header.data_start + entry.begin : header.data_start + entry.end]


def _content_problems(header: Header, mapping: mmap.mmap) -> Iterator[str]:
    """Rehash every tensor and look for values that are not finite; gap fillers must be zero."""
    for name, entry in header.entries.items():
        data = memoryview(mapping)[header.data_start + entry.begin : header.data_start + entry.end]
        if entry.is_pad:
            if any(data):
                yield f"gap filler {name} is damaged"
        elif tensor_name(entry.dtype, entry.shape, data) != name:
            yield f"tensor {name[:80]} is damaged: its bytes do not match its name"
        elif not is_finite(entry, data):
            yield f"tensor {name} holds NaN or infinite values"


def is_finite(entry: Entry, data: memoryview) -> bool:
    """Whether a tensor with these bytes holds neither NaN nor infinity."""
    exponent = _EXPONENTS.get(entry.dtype)
    item = ITEM_BYTES[entry.dtype]
    if exponent is None:
        return True
    chunks = (data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES))
    return not any(
        ((np.frombuffer(chunk, f"<u{item}") & exponent) == exponent).any() for chunk in chunks
    )
