"""The originals of a drift check in PyTorch, from a workload; and bundles in which queries have them again."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from gemel.edge_runtime.frames.samples import Predict
from gemel.evaluation import open_matching_bundle, query_as_shipped
from gemel.models.antialias import resize_antialiased
from gemel.models.bundle import (
    Bundle,
    BundleQuery,
    Made,
    has_documents,
    open_bundle,
    write_bundle,
    write_substituted,
)
from gemel.models.detector import read_outputs
from gemel.models.errors import InputError
from gemel.models.export.export_document import export_documents
from gemel.models.files.weights import load_weights
from gemel.models.predictions import Prediction
from gemel.models.preprocess import Size
from gemel.models.tasks import task_of
from gemel.models.tensors import normalise_frames
from gemel.models.workload import Query, Workload, inputs_of, load_workload
from gemel.models.zoo import build_query, preprocess_of
from gemel.originals import BUNDLE_HINT, Original, Originals, read_bundle_name


def find_bundle(spool: Path, load: Workload, given: str | Path | None) -> Bundle:
    """The given bundle, or the one that the ledger names; InputError where it does not fit the workload."""
    if given is not None:
        return open_matching_bundle(given, load)
    name = read_bundle_name(spool)
    try:
        return open_matching_bundle(name, load)
    except InputError as error:
        problem = f"{error.problem} (the ledger in {spool} names it)"
        raise InputError(error.where, problem, BUNDLE_HINT, error.key) from error


def load_original(query: Query) -> nn.Module:
    """A query's own trained model; InputError where its weights are missing or do not fit."""
    original = build_query(query)
    load_weights(query, original)
    return original.eval()


def open_originals(
    spool: Path, workload: str | Path | Workload, bundle: str | Path | None, opens_bundle: bool
) -> Originals:
    """The originals of a workload; with `opens_bundle` as the bundle has their queries.

    Raises InputError where the workload cannot be read, or the bundle is not of it.
    """
    load = load_workload(workload) if isinstance(workload, str | Path) else workload
    opened = find_bundle(spool, load, bundle) if opens_bundle else None
    rows = (
        Original(query, query if opened is None else query_as_shipped(query, opened), partial(_load_predict, query))
        for query in load.queries
    )
    return Originals(load.name, tuple(rows), tuple(inputs_of(load)), opened)


def _load_predict(query: Query) -> Predict:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    original, task, preprocess = load_original(query).to(device), task_of(query), preprocess_of(query)

    @torch.inference_mode()
    def predict(batch: np.ndarray, sizes: Sequence[tuple[int, int]]) -> list[Prediction]:
        pictures = torch.from_numpy(_resize(batch, preprocess.size)).to(device)
        inputs = normalise_frames(preprocess, pictures)
        return read_outputs(task, original, original(inputs), sizes, query.classes, preprocess=preprocess)

    return predict


def _resize(pictures: np.ndarray, size: Size) -> np.ndarray:
    """Samples (N, 3, H, W), of the size of the network that answered, as the original takes them."""
    if pictures.shape[2:] == size:
        return pictures
    height, width = size
    images = (np.ascontiguousarray(picture.transpose(1, 2, 0)) for picture in pictures)
    return np.stack([resize_antialiased(image, (width, height)).transpose(2, 0, 1) for image in images])


def write_reverted(out: Path, below: Sequence[Query], bundle: Bundle) -> frozenset[str]:
    """Write a bundle in which these queries have their own weights; returns those that had not before."""
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".gemel-") as folder:
        own = write_originals(Path(folder) / "own", below, bundle)
        ids = [query.id for query in below]
        reverted = frozenset(one for one in ids if own.query(one).places() != bundle.query(one).places())
        if reverted:
            write_substituted(out, bundle, dict.fromkeys(reverted, own))
    return reverted


def write_originals(path: Path, queries: Sequence[Query], bundle: Bundle) -> Bundle:
    """A bundle of these queries with their own weights; the evidence compares each original with itself."""
    records = []
    for query in queries:
        record = bundle.query(query.id)
        evidence = record.evidence
        if evidence is not None:
            evidence = {**evidence, "merged": evidence["original"], "ratio": 1.0, "state": "unchanged", "proven": False}
        records.append(replace(BundleQuery.of(query, evidence, record.threshold), origin=record.origin))
    models = {query.id: load_original(query) for query in queries}
    made = Made(bundle.manifest.workload, bundle.manifest.method, 0)
    documents = export_documents(models, records) if has_documents(bundle.queries) else {}
    write_bundle(path, models, records, made, documents=documents)
    return open_bundle(path, bundle.factories, bundle.folder)
