"""The canary: new weights are tried on the last frames before they serve; a query that answers otherwise keeps its old.

Otherwise means: its agreement with the answers that were given is below its accuracy target, for certain
(`models.evaluation`). Queries that are asked something else from now on are not tried, nor those that the last
drift check found below their target: there the old answers are what is wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from edge_runtime.box import LoadedBox, load_box
from edge_runtime.config import SpoolConfig
from edge_runtime.engines.torch_engine import TorchEngine
from edge_runtime.results import BUNDLE_DIGITS
from edge_runtime.samples import SUFFIX, Predict, compare_samples, expected_agreement, read_drift, read_head
from models.bundle import Bundle, BundleQuery, write_substituted
from models.errors import InputError
from models.evaluation import BELOW, TOO_FEW, Agreement, compare_agreement
from models.tasks import task_of

MAX_FRAMES = 64
"""Of one query, on which its new weights are tried."""
FILES = ("canary-1.safetensors", "canary-2.safetensors")
"""Beside the samples: what serves where a query was held back, one while the other is at work."""

log = logging.getLogger("gemel.run")


def run_canary(before: LoadedBox, after: LoadedBox, spool: SpoolConfig) -> LoadedBox:
    """The box that is to serve, with each query that fails the trial as it is in the one that serves.

    `held_back` of the box says which and why. Raises InputError where that cannot be written.
    """
    old, new = before.bundle, after.bundle
    digits, found = old.digest[:BUNDLE_DIGITS], dict[str, Agreement]()
    for query in to_try(old, new, _fallen(spool, digits)):
        paths = _newest(spool.samples, query.id, digits)
        beside = compare_samples(query, paths, _asking(new, query.id))
        expected = beside.expected * expected_agreement(query)
        found[query.id] = compare_agreement(
            replace(beside, expected=expected), task_of(query.task), query.accuracy_target
        )
        if found[query.id].verdict == TOO_FEW:
            log.info("query %s: %d samples are too few to try its new weights on", query.id, len(paths))
    reasons = held_back(found, {query.id: query.accuracy_target for query in new.queries})
    if not reasons:
        return after
    path = spool.samples / next(name for name in FILES if name != old.path.name)
    write_substituted(path, new, dict.fromkeys(reasons, old), overwrite=True)
    for query, reason in reasons.items():
        log.warning("query %s keeps its old weights: %s", query, reason)
    mixed = load_box(replace(after.config, bundle=path, public_key=None))  # what it is made of was checked
    return replace(mixed, held_back=reasons)


def to_try(old: Bundle, new: Bundle, fallen: Collection[str]) -> list[BundleQuery]:
    """Queries that are asked the same as before and have other weights, without those that have `fallen`."""
    before = {query.id: query for query in old.queries}
    return [
        query for query in new.queries
        if query.id in before and query.id not in fallen
        and _question(query) == _question(before[query.id]) and query.places() != before[query.id].places()
    ]  # fmt: skip


def held_back(found: Mapping[str, Agreement], targets: Mapping[str, float]) -> dict[str, str]:
    """The queries that keep their old weights, and why."""
    return {
        query: f"on the last {one.frames} frames the new ones agree with its answers by {one.ratio:.2f}, its target is "
        f"{targets[query]:g}"
        for query, one in found.items() if one.verdict == BELOW and one.ratio is not None
    }  # fmt: skip


def _question(query: BundleQuery) -> tuple[object, ...]:
    return query.camera, query.roi, query.task, query.classes, query.input_size, query.preprocess


def _fallen(spool: SpoolConfig, bundle: str) -> set[str]:
    """Queries that the last drift check found below their target, if it was one of this bundle."""
    try:
        checked = read_drift(spool.path)
    except InputError:  # there was none
        return set()
    return {one.id for one in checked.queries if one.verdict == BELOW} if checked.bundle == bundle else set()


def _newest(folder: Path, query: str, bundle: str) -> list[Path]:
    """The newest samples of a query and a bundle, in the order of time."""
    found: list[Path] = []
    named = sorted((path for path in folder.glob(f"*{SUFFIX}") if f"-{query}-" in path.name), reverse=True)
    for path in named:
        try:
            head = read_head(path)
        except InputError:
            continue
        if (head.query, head.bundle) == (query, bundle):
            found.append(path)
        if len(found) == MAX_FRAMES:
            break
    return found[::-1]


def _asking(bundle: Bundle, query: str) -> Predict:
    """How a query of a bundle answers, on the processor."""
    engine = TorchEngine(bundle, query)
    tensors = {name: bundle.read(name) for name in bundle.names_in_order(query)}
    engine.bind(tensors.__getitem__)

    @torch.inference_mode()
    def answers(batch, sizes):
        return engine.decode(engine.forward(engine.query.preprocess.normalise(batch)), sizes, 0.0)

    return answers
