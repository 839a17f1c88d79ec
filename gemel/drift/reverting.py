"""Queries get their own original weights again: the bundle that a box ran, with nobody else changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from edge_runtime.frames.results import BUNDLE_DIGITS
from edge_runtime.serving.ledger_file import LEDGER_FILE
from gemel.evaluation import open_matching_bundle
from models.bundle import Bundle, BundleEvidence, Made, open_bundle, write_bundle
from models.errors import InputError
from models.io import read_json
from models.weights import load_weights
from models.workload import Query, Workload
from models.zoo import build_query

OPTION = "name it with --bundle"


def bundle_of(spool: Path, load: Workload, given: str | Path | None) -> Bundle:
    """The bundle that a box ran: the one that is given, or that the ledger in its spool names.

    Raises InputError where there is none, or it does not hold the workload's queries.
    """
    if given is not None:
        return open_matching_bundle(given, load)
    path = spool / LEDGER_FILE
    named = read_json(path, OPTION).get("bundle")
    if not isinstance(named, str) or not named:
        raise InputError(path, "does not say which bundle the box ran", OPTION, "bundle")
    try:
        return open_matching_bundle(named, load)
    except InputError as error:
        raise InputError(error.where, f"{error.fault} (the ledger in {spool} names it)", OPTION, error.key) from error


def check_same(bundle: Bundle, digits: str) -> None:
    """Raise InputError unless this is the bundle that samples are of."""
    if bundle.digest[:BUNDLE_DIGITS] != digits:
        fault = f"has the SHA-256 {bundle.digest[:BUNDLE_DIGITS]}..., the newest samples are of {digits}..."
        raise InputError(bundle.path, fault, f"{OPTION}: the one that the box ran then")


def original_of(query: Query) -> nn.Module:
    """A query's own trained model; InputError where its weights are missing or do not fit."""
    original = build_query(query)
    load_weights(query, original)
    return original.eval()


def write_originals(path: Path, queries: Sequence[Query], bundle: Bundle) -> Bundle:
    """A bundle of these queries alone, each with its own weights and everything else as it is in `bundle`.

    Its evidence is that of the original against itself.
    """
    bare: dict[str, Any] = {"tensors": {}, "residuals": {}, "stored": {}, "trained": None}
    records = []
    for query in queries:
        old = bundle.query(query.id)
        own = {**bare, "model_args": dict(query.model_args), "evidence": _own(old.evidence)}
        records.append(dataclasses.replace(old, **own))
    models = {query.id: original_of(query) for query in queries}
    write_bundle(path, models, records, Made(bundle.manifest.workload, bundle.manifest.method, 0))
    return open_bundle(path, bundle.factories, bundle.folder)


def is_own_already(query: str, own: Bundle, bundle: Bundle) -> bool:
    """Whether a query has its own weights in the bundle as it is."""
    return own.query(query).places() == bundle.query(query).places()


def _own(evidence: BundleEvidence | None) -> BundleEvidence | None:
    if evidence is None:
        return None
    return BundleEvidence(
        metric=evidence["metric"], split=evidence["split"], samples=evidence["samples"], original=evidence["original"],
        merged=evidence["original"], ratio=1.0, ci95=(1.0, 1.0), certain=True,
    )  # fmt: skip
