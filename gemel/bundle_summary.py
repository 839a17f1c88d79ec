"""What a bundle holds: queries, bytes, shared weights, and the outcome of each set of layers in the merge.

Outcomes come from the log beside the bundle, or, without one, from the bundle's manifest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from gemel.models.bits import FP32, WEIGHTS, main_bits
from gemel.models.bundle import Bundle, BundleQuery
from gemel.models.bundle.manifest import original_bytes
from gemel.models.errors import InputError, join_names, one_line
from gemel.models.files.io import Exact, read_json_lines, validate
from gemel.models.sharing.layers import SetOutcome, weight_key
from gemel.proof_file import find_proofs
from gemel.text import (
    bits_text,
    cost_text,
    key_text,
    networks_text,
    number,
    percent,
    saved_text,
    size,
    state_text,
    table,
)

MAX_LOG_BYTES, MAX_LOG_LINE_BYTES = 2**26, 2**23
LOG_SUFFIX = ".log.jsonl"
NO_LOG = "no log beside the bundle: only what is shared is known, not what was tried"
OTHER_LOG = "the log beside the bundle is another merge's: only what is shared is known"
EQUAL = "the merge tried to share nothing: what is shared was equal before"
UNREADABLE = "only what is shared is known: the log beside the bundle is malformed"
WEIGHT = len(".weight")
"""What follows a layer's path in the key of its weight; `_weight` is as long."""
MAX_NAMES, MAX_REASONS = 4, 2
OUTCOME_WORDS = {
    SetOutcome.KEPT: "kept", SetOutcome.PARTLY: "partly kept", SetOutcome.REFUSED: "refused",
    SetOutcome.UNTRIED: "untried (time)",
}  # fmt: skip
"""Outcomes in the order of the tables."""

Member = Annotated[tuple[str, str], Field(strict=False)]
Bytes = Annotated[int, Field(ge=-(2**50), le=2**50)]
Flops = Annotated[float, Field(ge=0, le=1e30)]


class _Row(Exact, extra="allow"):
    """A log row; other keys are left."""


class ObstacleRow(_Row):
    """Why a query left a set: after which step, with which ratio against the required one."""

    after: str
    ratio: float | None
    required: float | None


class SetRow(_Row):
    """A set of layers that the merge set out to share (`merger.outcomes`); without a log the cost is unknown."""

    set: Annotated[list[Member], Field(min_length=1)]
    bytes: Bytes
    outcome: Annotated[SetOutcome, Field(strict=False)]
    kept: list[Member]
    in_the_way: dict[str, ObstacleRow]
    saved_bytes: Bytes
    flops: Flops | None
    together: Annotated[int, Field(ge=1)] | None


class RepairRow(_Row):
    """A step that repaired a query."""

    repair: str
    query: str
    required: float | None
    ratio: float | None = None


class BitsRow(_Row):
    """Why a query has no fewer bits; empty where there was no reason to try."""

    query: str
    why_bits: str


class CostKeys(Exact):
    """What a merge cost (merger.cost_meter.MergeCost)."""

    seconds: Flops
    flops: Flops
    currency: str
    money: Flops | None
    money_per_gib: Flops | None
    told_seconds: Flops | None
    told_money: Flops | None


class MergeCostRow(_Row):
    """The last row of a merge with prices."""

    cost: CostKeys


@dataclass(frozen=True)
class MergeOutcomes:
    """What became of each set of layers, the repairs, why queries have no fewer bits, and the cost.

    `note`: why there is no log.
    """

    sets: tuple[SetRow, ...]
    repairs: tuple[RepairRow, ...] = ()
    reasons: tuple[BitsRow, ...] = ()
    note: str = ""
    costs: tuple[MergeCostRow, ...] = ()

    @classmethod
    def of(cls, bundle: Bundle) -> MergeOutcomes:
        """Read the log beside the bundle if it is of this merge, else the manifest."""
        path = Path(f"{bundle.path}{LOG_SUFFIX}")
        if not path.exists():
            return cls(tuple(shared_sets(bundle)), note=NO_LOG)
        try:
            found = read_merge_log(path)
        except InputError as error:
            return cls(tuple(shared_sets(bundle)), note=f"{UNREADABLE}: {error}")
        tensors = {query.id: query.tensors for query in bundle.queries}
        if not all(_is_shared(tensors, row.kept) for row in found.sets):
            return cls(tuple(shared_sets(bundle)), note=OTHER_LOG)
        if not found.sets and (equal := shared_sets(bundle)):
            return cls(tuple(equal), note=EQUAL)
        return found

    def to_json(self) -> dict[str, Any]:
        """The keys that `gemel bundle show --json` gets from it."""
        rows = {"sets": self.sets, "repairs": self.repairs, "bits": self.reasons}
        plain = {name: [one.model_dump(mode="json", exclude_unset=True) for one in own] for name, own in rows.items()}
        cost = self.costs[-1].cost.model_dump() if self.costs else None
        return {**plain, "cost": cost, "source": self.note or "log"}

    def to_text(self, every_set: bool = False) -> str:
        """A table of the sets, equal outcomes in one line unless `every_set`, and the repairs."""
        lines = [self.note] if self.note else []
        if self.sets and not self.note:
            spent = sum((row.flops or 0) / (row.together or 1) for row in self.sets)
            lines.append(f"{len(self.sets)} sets of layers could be shared; trying them took {spent:.3g} FLOPs")
        lines += [cost_text(row.cost.model_dump()) for row in self.costs]
        steps = defaultdict[tuple[str, str], list[str]](list)
        for row in self.repairs:
            ratio = "" if row.ratio is None else f" {number(row.ratio)}"
            steps[row.query, number(row.required)].append(row.repair + ratio)
        lines += [f"{query} ({required} required): {', '.join(own)}" for (query, required), own in steps.items()]
        lines += [f"{row.query} has no fewer bits: {row.why_bits}" for row in self.reasons if row.why_bits]
        shown = _set_table(self.sets, every_set) if self.sets else "nothing is shared"
        return "\n".join([shown, *map(one_line, lines)])

    def why_nothing(self, unproven: Sequence[str] = ()) -> str:
        """Why nothing is shared, in one line; empty where something is. `unproven` queries were not tried."""
        if any(row.kept for row in self.sets):
            return ""
        if not self.sets and unproven:
            return f"nothing is shared: {join_names(unproven)} cannot be proven with what there is here (see the notes)"
        if not self.sets:
            return "nothing is shared: no two models have a layer in common that saves enough"
        last = {query: row for row in self.sets for query in row.in_the_way}
        reasons = "; ".join(dict.fromkeys(map(_reasons, last.values())))
        return f"nothing is shared, every model is its original: {reasons or 'no set of layers was tried to the end'}"


def read_merge_log(path: Path) -> MergeOutcomes:
    """What a merge's log holds of its outcomes; InputError, which names the line, for a malformed one."""
    kinds: dict[str, tuple[type[_Row], list[Any]]] = {
        "set": (SetRow, []), "repair": (RepairRow, []), "why_bits": (BitsRow, []), "cost": (MergeCostRow, []),
    }  # fmt: skip
    for line, row in read_json_lines(path, "", MAX_LOG_BYTES, MAX_LOG_LINE_BYTES, torn=False):
        for key in kinds.keys() & row.keys():  # only rows of one kind have its key
            schema, rows = kinds[key]
            rows.append(validate(f"{path}: line {line}", row, schema))
    sets, repairs, reasons, costs = (tuple(rows) for _, rows in kinds.values())
    return MergeOutcomes(sets, repairs, reasons, costs=costs)


def shared_sets(bundle: Bundle) -> list[SetRow]:
    """The sets that share a weight, from the manifest, as log rows without what only a log knows."""
    rows = []
    for one in bundle.manifest.shared:
        members = [(query, key[:-WEIGHT]) for query, key in one.members if key.endswith("weight")]
        if len(bundle.header.entries[one.tensor].shape) > 1 and len(members) > 1:
            nbytes = bundle.nbytes(one.tensor)
            rows.append(SetRow(
                set=members, bytes=nbytes, outcome=SetOutcome.KEPT, kept=members, in_the_way={},
                saved_bytes=nbytes * (len(members) - 1), flops=None, together=None,
            ))  # fmt: skip
    return rows


def _is_shared(tensors: Mapping[str, Mapping[str, str]], kept: Sequence[tuple[str, str]]) -> bool:
    """Whether these members use one tensor."""
    names = {(own := tensors.get(query, {})).get(weight_key(own, path)) for query, path in kept}
    return len(names) <= 1 and None not in names


def _set_table(sets: Sequence[SetRow], every_set: bool) -> str:
    """A line for each set, or for all sets of one outcome with the same queries and the same reason."""

    def key(row: SetRow) -> tuple[int, str, str]:
        return list(SetOutcome).index(row.outcome), _set_queries(row), _reasons(row)

    def total_saved(rows: Sequence[SetRow]) -> int:
        return sum(row.saved_bytes or row.bytes for row in rows)

    alike = [[row] for row in sets] if every_set else [list(rows) for _, rows in groupby(sorted(sets, key=key), key)]
    alike.sort(key=lambda rows: (key(rows[0])[0], -total_saved(rows)))
    lines = [
        (_layer(rows[0]) if every_set else len(rows), OUTCOME_WORDS[rows[0].outcome], _set_queries(rows[0]),
         size(sum(row.bytes for row in rows)), size(sum(row.saved_bytes for row in rows)), _reasons(rows[0]))
        for rows in alike
    ]  # fmt: skip
    headers = ("layer" if every_set else "sets", "outcome", "queries", "weights", "saved", "blocked by")
    return table(headers, lines)


def _layer(row: SetRow) -> str:
    """The layer's path; where members have several, the first and their number."""
    return join_names(list(dict.fromkeys(path for _, path in row.set)), 1)


def _set_queries(row: SetRow) -> str:
    """The queries that share, and those of the set that do not."""
    kept = list(dict.fromkeys(query for query, _ in row.kept))
    without = [query for query in dict.fromkeys(query for query, _ in row.set) if query not in kept]
    if not kept:
        return join_names(without, MAX_NAMES)
    return join_names(kept, MAX_NAMES) + (f", without {join_names(without, MAX_NAMES)}" if without else "")


def _reasons(row: SetRow) -> str:
    found = [
        f"{query}: {percent(why.ratio)} of {percent(why.required)} after {why.after}"
        if why.ratio is None or why.required is None or why.ratio < why.required
        else f"{query}: keeps its own after {why.after}"
        for query, why in row.in_the_way.items()
    ]
    more = len(found) - MAX_REASONS
    return "; ".join(found[:MAX_REASONS]) + (f"; and {more} more" if more > 0 else "")


def shared_tensors(bundle: Bundle) -> list[dict[str, Any]]:
    """Every weight that two or more layers use, with its size and those layers."""
    shapes = {one.tensor: list(bundle.header.entries[one.tensor].shape) for one in bundle.manifest.shared}
    return [
        {"tensor": one.tensor, "bytes": bundle.nbytes(one.tensor), "shape": shapes[one.tensor],
         "members": [list(member) for member in one.members]}
        for one in bundle.manifest.shared if len(shapes[one.tensor]) > 1
    ]  # fmt: skip


def byte_counts(bundle: Bundle, outcomes: MergeOutcomes) -> dict[str, Any]:
    """Bytes before and after, in all and by query, as stored, with the bits and why these are not fewer.

    A tensor used by n queries counts 1/n for each (`shared_part`), so the parts of all queries add up to `after`.
    """
    users = defaultdict[str, set[str]](set)
    for query in bundle.queries:
        for name in query.places().values():
            users[name].add(query.id)
    rows, reasons = [], {row.query: row.why_bits for row in outcomes.reasons}
    for query in bundle.queries:
        names = set(query.tensors.values())
        rows.append({
            "query": query.id,
            "model": query.model,
            "bits": bits_text(query_bits(query), bool(query.activations)),
            "why_bits": reasons.get(query.id, ""),
            "before": original_bytes(query, bundle.header.entries),
            "shared_part": sum(bundle.nbytes(name) / len(users[name]) for name in names if len(users[name]) > 1),
            "private": sum(bundle.nbytes(name) for name in names if len(users[name]) == 1),
        })  # fmt: skip
    counts = bundle.manifest.bytes
    return {
        "before": counts.before,
        "after": counts.after,
        "ceiling": counts.ceiling,
        "saved_fraction": 1 - counts.after / counts.before,
        "ceiling_fraction": counts.ceiling / counts.before,
        "stored": bytes_by_dtype(bundle),
        "queries": rows,
    }


def bytes_by_dtype(bundle: Bundle) -> dict[str, int]:
    """Bytes of the weights by stored dtype (fp32, fp16, int8, int4); scales count with what they scale."""
    found = {dtype: dict[str, int]() for dtype in WEIGHTS}
    for query in bundle.queries:
        for key, name in query.tensors.items():
            own = query.stored.get(key)
            found[own.dtype if own is not None else FP32][name] = bundle.nbytes(name)
            if own is not None and own.scale is not None:
                found[own.dtype][own.scale] = bundle.nbytes(own.scale)
    return {dtype: sum(sizes.values()) for dtype, sizes in found.items() if sizes}


def measure_resident_bytes(bundle: Bundle) -> int:
    """Bytes of unique memory of all queries' models built together; packed weights as a box holds them."""
    found: dict[int, int] = {}
    for query in bundle.queries:
        model = bundle.build(query.id).state_dict()
        held = [tensor for key, tensor in model.items() if key not in query.stored]
        places = query.places()
        held += [bundle.tensor(places[key]) for key in places if key in query.stored or key not in model]
        found |= {tensor.data_ptr(): tensor.nbytes for tensor in held}
    return sum(found.values())


@dataclass(frozen=True)
class BundleSummary:
    """A bundle, its bytes (`byte_counts`), and the outcomes of its merge."""

    bundle: Bundle
    bytes: dict[str, Any]
    outcomes: MergeOutcomes

    def to_json(self) -> dict[str, Any]:
        """The keys of `gemel bundle show --json`."""
        manifest = self.bundle.manifest
        keys = (
            "id",
            "camera",
            "task",
            "classes",
            "model",
            "input_size",
            "fps",
            "sla_ms",
            "accuracy_target",
            "evidence",
        )
        proofs = find_proofs(self.bundle)
        return {
            "workload": manifest.workload,
            "method": manifest.method,
            "digest": self.bundle.digest,
            "bytes": self.bytes,
            "queries": [
                {
                    **{key: getattr(query, key) for key in keys},
                    "precision": _precision(query),
                    "bits": query_bits(query),
                    "in_integers": bool(query.activations),
                    "network": network_of(query),
                    "proof": proofs.get(query.id),
                }
                for query in self.bundle.queries
            ],
            "shared": shared_tensors(self.bundle),
            **self.outcomes.to_json(),
        }

    def to_text(self, every_set: bool = False) -> str:
        """Tables of the queries and of the sets; the sets one by one on demand."""
        counts, manifest, proofs = self.bytes, self.bundle.manifest, find_proofs(self.bundle)
        rows = [
            (row["query"], row["model"], size(row["before"]), size(row["private"]), size(row["shared_part"]),
             row["bits"], _precision(query) or "-", _evidence(query, proofs.get(query.id, {}), manifest.method))
            for row, query in zip(counts["queries"], self.bundle.queries, strict=True)
        ]  # fmt: skip
        headers = (
            "query",
            "model",
            "original",
            "private",
            "shared (its part)",
            "bits",
            "trained in",
            "against the original",
        )
        networks = networks_text({query.id: network_of(query) for query in self.bundle.queries})
        return "\n".join([
            *([networks, ""] if networks else []),
            table(headers, rows),
            "",
            one_line(f"{manifest.workload}, method {manifest.method}")
            + f": {size(counts['before'])} became {size(counts['after'])}, "
            + saved_text(counts["saved_fraction"], counts["ceiling_fraction"]),
            "stored as " + ", ".join(f"{dtype} {size(nbytes)}" for dtype, nbytes in counts["stored"].items()),
            "",
            self.outcomes.to_text(every_set),
            "",
            f"SHA-256 {self.bundle.digest}",
        ])  # fmt: skip


def summarize_bundle(bundle: Bundle) -> BundleSummary:
    """Summarize a bundle and the log beside it."""
    outcomes = MergeOutcomes.of(bundle)
    return BundleSummary(bundle, byte_counts(bundle, outcomes), outcomes)


def _evidence(query: BundleQuery, proof: Mapping[str, Any], method: str) -> str:
    """The query against its original, with what is proven; a later `proof` replaces what the merge knew."""
    evidence: Mapping[str, Any] = query.evidence or {}
    known = {**evidence, **proof}
    if not known:
        return "unchanged" if method == "none" and not query.stored else "no evidence in the bundle"
    if known.get("reason") and not proof:
        return one_line(f"no evidence: {known['reason']}")
    texts = []
    if "metric" in evidence:
        texts.append(f"{number(evidence['original'])} -> {number(evidence['merged'])} {key_text(evidence['metric'])}")
    agreement = proof.get("answers_kept") or evidence.get("agreement")
    if isinstance(agreement, float):
        texts.append(f"answers as before on {percent(agreement)}")
    return one_line("; ".join([", ".join(texts), _proof(known)] if texts else [_proof(known)]))


def _proof(found: Mapping[str, Any]) -> str:
    """What is proven, as the manifest or a proof beside the bundle says it."""
    end = found.get("lower_end")
    low = float(end) if isinstance(end, int | float) else None
    return state_text(str(found.get("state", "not proven")), low, str(found.get("from")), str(found.get("needs", "")))


def query_bits(query: BundleQuery) -> str:
    """The bits of most of a query's weights."""
    return main_bits(stored.dtype for stored in query.stored.values())


def _precision(query: BundleQuery) -> str | None:
    return query.trained.precision if query.trained is not None else None


def network_of(query: BundleQuery) -> str | None:
    """The other query whose network answers this one."""
    return None if query.substitution is None else query.substitution.query
