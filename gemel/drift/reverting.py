"""Queries get their own original weights again: the bundle that a box ran, with nobody else changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from edge_runtime.frames.results import BUNDLE_DIGITS
from edge_runtime.serving.ledger_file import LEDGER_FILE
from gemel.evaluation.belonging import belonging
from models.bundle import Bundle, BundleEvidence, BundleQuery, Part
from models.errors import InputError
from models.files.json_file import read_json
from models.weights.reading import load_weights
from models.workload import Query, Workload
from models.zoo import build_query

OPTION = "name it with --bundle"


def bundle_of(spool: Path, load: Workload, given: str | Path | None) -> Bundle:
    """The bundle that a box ran: the one that is given, or that the ledger in its spool names.

    Raises InputError where there is none, or it does not hold the workload's queries.
    """
    if given is not None:
        return belonging(given, load)
    path = spool / LEDGER_FILE
    named = read_json(path, OPTION).get("bundle")
    if not isinstance(named, str) or not named:
        raise InputError(path, "does not say which bundle the box ran", OPTION, "bundle")
    try:
        return belonging(named, load)
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


def part_of(query: Query, original: nn.Module, bundle: Bundle) -> Part:
    """A query with its own weights again, everything else as it is in the bundle; its evidence is that of the original
    against itself.
    """
    old = bundle.query(query.id)
    bare: dict[str, Any] = {"tensors": {}, "residuals": {}, "stored": {}, "trained": None}
    record = dataclasses.replace(old, model_args=dict(query.model_args), evidence=_own(old.evidence), **bare)
    return Part(record, original.cpu())


def is_own_already(part: Part, bundle: Bundle) -> bool:
    """Whether a query has its own weights in the bundle as it is."""
    old: BundleQuery = bundle.query(part.record.id)
    if old.stored or old.residuals or old.model_args != part.record.model_args:
        return False
    mine: Mapping[str, torch.Tensor] = part.model.state_dict()
    return mine.keys() == old.tensors.keys() and all(
        torch.equal(mine[key], bundle.tensor(name)) for key, name in old.tensors.items()
    )


def _own(evidence: BundleEvidence | None) -> BundleEvidence | None:
    if evidence is None:
        return None
    return BundleEvidence(
        metric=evidence["metric"], split=evidence["split"], samples=evidence["samples"], original=evidence["original"],
        merged=evidence["original"], ratio=1.0, ci95=(1.0, 1.0), certain=True,
    )  # fmt: skip
