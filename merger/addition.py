"""A bundle that grows: which queries of a workload it holds as they are, which are new, which leave.

A query stays, bit by bit and with its proof, where its definition and its original are those that it was merged from
(models.bundle.origin). How often and how urgently it runs may change. All others are new: they are merged with those
that stay as donors (merger.donors), so the cost grows with what is new.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gemel.merger.donors import Donors
from gemel.merger.networks import answered_by
from gemel.models.bundle import Bundle, BundleQuery, open_bundle, verify_bundle
from gemel.models.bundle.origin import RUN_KEYS, is_at_hand, origin_of
from gemel.models.bundle.signing import check_signature, is_signed
from gemel.models.errors import BundleError, InputError, size_text
from gemel.models.notes import add_note
from gemel.models.sharing.groups import groups
from gemel.models.sharing.layers import Layer, layers_of, model_bytes, weight_key
from gemel.models.workload import Query, Workload

MUCH_ADDED = 0.25
"""Part of a bundle's bytes that only added queries use, from which a whole merge is recommended."""
WHOLE = "merge once without --onto"


@dataclass(frozen=True)
class Addition:
    """What a workload adds to a bundle.

    `kept` are the records of the queries that stay, as the workload says that they run; `new` are to be merged,
    `removed` leave the bundle.
    """

    bundle: Bundle
    workload: Workload
    kept: Mapping[str, BundleQuery]
    new: tuple[str, ...]
    removed: tuple[str, ...]

    @property
    def new_workload(self) -> Workload:
        """The workload of the new queries alone."""
        return replace(self.workload, queries=tuple(self.workload.query(query) for query in self.new))

    @property
    def donor_queries(self) -> dict[str, Query]:
        """The queries that stay and have a network of their own, which the bundle holds."""
        alone = (record.id for record in self.kept.values() if record.substitution is None)
        return {query: self.workload.query(query) for query in alone}

    def open_donors(self, device: torch.device) -> Donors:
        """Those queries as donors."""
        return Donors(self.bundle, self.donor_queries, tuple(self.kept.values()), device)

    def describe(self) -> dict[str, Any]:
        """What stays, comes and leaves, for the log and the report."""
        onto = str(self.bundle.path)
        return {"onto": onto, "kept": sorted(self.kept), "new": list(self.new), "removed": list(self.removed)}


def open_addition(path: str | Path, workload: Workload, public_key: str | Path | None = None) -> Addition:
    """Compare a bundle with a workload; notes say why a query of both counts as new.

    Raises BundleError for a bundle that is damaged or, with a `public_key`, not signed by its owner, and InputError for
    one of another workload and one that has no query of this one as it is.
    """
    factories = sorted({query.model for query in workload.queries if ":" in query.model})
    bundle = open_bundle(path, factories, workload.path.parent)
    if public_key is not None:
        check_signature(bundle, public_key)
    elif is_signed(bundle):
        add_note(bundle.path, "its signature is not checked", "give --public-key; the new bundle is to be signed again")
    for problem in verify_bundle(path, factories, workload.path.parent):
        raise BundleError(bundle.path, problem, "copy it again")
    if bundle.manifest.workload != workload.name:
        problem = f"is of the workload '{bundle.manifest.workload}', and this one is '{workload.name}'"
        raise InputError(bundle.path, problem, "give the bundle of this workload", "--onto")
    if not any(record.origin for record in bundle.queries):
        problem = "does not say what its queries were merged from: an older version wrote it"
        raise InputError(bundle.path, problem, WHOLE, "--onto")
    records = {record.id: record for record in bundle.queries}
    kept, new = dict[str, BundleQuery](), list[str]()
    for query in workload.queries:
        record = records.get(query.id)
        change = "" if record is None else _find_change(query, record)
        if record is None or change:
            new.append(query.id)
        else:
            kept[query.id] = replace(record, **{key: getattr(query, key) for key in RUN_KEYS})
        if change:
            add_note(query.id, f"{change} since {bundle.path.name} was made: it is a new query")
    if not kept:
        problem = f"has no query of {workload.path.name} as it is there"
        raise InputError(bundle.path, problem, WHOLE, "--onto")
    removed = tuple(query for query in records if query not in {one.id for one in workload.queries})
    return Addition(bundle, workload, kept, tuple(new), removed)


def _find_change(query: Query, record: BundleQuery) -> str:
    """What differs from what a query was merged from; empty where nothing does."""
    if record.origin is None:
        return "what it was merged from is not known"
    origin = origin_of(query)
    if origin.definition != record.origin.definition:
        return "its definition has changed"
    if not is_at_hand(query):
        add_note(query.id, f"its original, {query.weights}, is not at hand: it stays as the bundle has it")
        return ""
    return "its original has changed" if origin.weights != record.origin.weights else ""


@dataclass(frozen=True)
class NewCost:
    """What a new query of `bytes` in float32 takes on a box at least: with a `lender`'s layers, or with a `network`.

    These are queries of the bundle, None where none could give any; norms and heads are the query's own. A network
    that answers the same classes costs nothing.
    """

    id: str
    bytes: int
    lender: str | None
    lender_bytes: int
    network: str | None
    network_bytes: int


def estimate_costs(addition: Addition) -> list[NewCost]:
    """The least that each new query would take, without its weights."""
    layers = {query: layers_of(one) for query, one in addition.donor_queries.items()}
    return [_estimate_cost(query, addition, layers) for query in addition.new_workload.queries]


def _estimate_cost(query: Query, addition: Addition, layers: Mapping[str, Sequence[Layer]]) -> NewCost:
    whole, own = model_bytes(query), layers_of(query)
    lent = {donor: sum(group.bytes for group in groups([*own, *others], "wide") if len(group.members) > 1)
            for donor, others in layers.items()}  # fmt: skip
    lender = max(lent, key=lambda donor: lent[donor], default=None)
    answered = dict[str, int]()
    for donor, one in addition.donor_queries.items():
        if one.task == query.task and not query.keep_architecture:
            head = sum(layer.bytes for layer in layers_of(answered_by(query, one)) if layer.head)
            answered[donor] = 0 if one.classes == query.classes else head
    network = min(answered, key=lambda donor: answered[donor], default=None)
    return NewCost(
        query.id, whole, lender, whole - (lent[lender] if lender else 0), network,
        answered[network] if network else whole,
    )  # fmt: skip


def freed_bytes(addition: Addition) -> int:
    """Bytes of tensors that only queries which leave, or are new now, use."""
    used = {name for record in addition.kept.values() for name in record.places().values()}
    names = {name for record in addition.bundle.queries for name in record.places().values()}
    return sum(addition.bundle.nbytes(name) for name in names - used)


def recommend_whole_merge(bundle: Bundle, workload: Workload) -> str:
    """What a merge of everything could save and would change, where much has been added to a bundle; else empty."""
    added = {record.id for record in bundle.queries if record.origin is not None and record.origin.added}
    users = dict[str, set[str]]()
    for record in bundle.queries:
        for name in record.places().values():
            users.setdefault(name, set()).add(record.id)
    added_bytes = sum(bundle.nbytes(name) for name, queries in users.items() if queries <= added)
    if added_bytes < MUCH_ADDED * bundle.manifest.bytes.after:
        return ""
    saved = possible_bytes(bundle, workload)
    return (
        f"{len(added)} of {len(bundle.queries)} queries, {size_text(added_bytes)} of "
        f"{size_text(bundle.manifest.bytes.after)}, were added since the whole merge: sharing every layer, another one "
        f"could save up to {size_text(saved)}; it would change all queries, and each needs a new proof"
    )


def possible_bytes(bundle: Bundle, workload: Workload) -> int:
    """Bytes of a bundle, as it stores them, that are left out if each group of layers that could share has one weight.

    Layers of networks that answer several queries count once.
    """
    layers, names = [], dict[tuple[str, str], str]()
    for record in bundle.queries:
        if record.substitution is None:
            own = layers_of(workload.query(record.id))
            layers += own
            names |= {(record.id, layer.path): record.tensors[weight_key(record.tensors, layer.path)] for layer in own}
    saved = 0
    for group in groups(layers, "wide"):
        sizes = [bundle.nbytes(name) for name in {names[member] for member in group.members}]
        saved += sum(sizes) - max(sizes)
    return saved
