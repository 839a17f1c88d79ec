"""What a bundle holds: queries, bytes, shared weights, and the outcome of each set of layers in the merge.

Outcomes come from the log beside the bundle, or, without one, from the bundle's manifest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from gemel.text import number, percent, size, table
from models.bits import FP32, WEIGHTS
from models.bundle import Bundle, BundleQuery
from models.bundle.manifest import original_bytes
from models.errors import InputError, one_line
from models.io import Exact, read_json_lines, validate
from models.sharing.layers import weight_key

OUTCOME_WORDS = {"kept": "kept", "partly": "partly kept", "refused": "refused", "untried": "not tried"}
"""Outcomes in the log, in the order of the tables, and what they are called there."""
MAX_LOG_BYTES, MAX_LOG_LINES, MAX_LOG_LINE_BYTES = 2**26, 50_000, 2**23

_Bytes = Annotated[int, Field(ge=0, le=2**50)]
_Saved = Annotated[int, Field(ge=-(2**50), le=2**50)]
_Flops = Annotated[float, Field(ge=0, le=1e30)]
_Ratio = Annotated[float, Field(ge=-1e9, le=1e9)] | None
_Member = Annotated[tuple[str, str], Field(strict=False)]


class _Row(Exact, extra="allow"):
    """A log row; other keys are left."""


class _Why(_Row):
    after: str
    ratio: _Ratio
    required: _Ratio


class _Set(_Row):
    set: Annotated[list[_Member], Field(min_length=1)]
    bytes: _Bytes
    outcome: Literal["kept", "partly", "refused", "untried"]
    kept: list[_Member]
    in_the_way: dict[str, _Why]
    saved_bytes: _Saved
    flops: _Flops
    together: Annotated[int, Field(ge=1)]


class _Repaired(_Row):
    repair: str
    query: str
    required: _Ratio
    ratio: _Ratio = None


class _Widths(_Row):
    width: str
    widened: list[str]
    in_the_way: list[str]


_KINDS = {"set": _Set, "repair": _Repaired, "width": _Widths}
"""By the key that only rows of this kind have."""


def read_merge_log(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a merge's log; InputError, which names the line, for a malformed one."""
    for line, row in read_json_lines(path, "", MAX_LOG_BYTES, MAX_LOG_LINE_BYTES, torn=False):
        if line > MAX_LOG_LINES:
            raise InputError(path, f"has more than {MAX_LOG_LINES} lines")
        for key, kind in _KINDS.items():
            if key in row:
                validate(f"{path}: line {line}", row, kind)
        yield row


LOG_SUFFIX = ".log.jsonl"
NO_LOG = "no log beside the bundle: only what is shared is known, not what was tried"
OTHER_LOG = "the log beside the bundle is another merge's: only what is shared is known"
EQUAL = "the merge tried to share nothing: what is shared was equal before"
UNREADABLE = "only what is shared is known: the log beside the bundle is malformed"
WEIGHT = len(".weight")
"""What follows a layer's path in the key of its weight; `_weight` is as long."""
MAX_NAMED = 4
Row = Mapping[str, Any]


@dataclass(frozen=True)
class MergeOutcomes:
    """Log rows of the sets (`merger.outcomes`), of repairs, and of wider weights; `note`: why there is no log."""

    sets: tuple[Row, ...]
    repairs: tuple[Row, ...] = ()
    widths: tuple[Row, ...] = ()
    note: str = ""

    @classmethod
    def of(cls, bundle: Bundle) -> MergeOutcomes:
        """Read the log beside the bundle if it is of this merge, else the manifest."""
        path = Path(f"{bundle.path}{LOG_SUFFIX}")
        if not path.exists():
            return cls(tuple(shared_sets(bundle)), note=NO_LOG)
        try:
            log = list(read_merge_log(path))
        except InputError as error:
            return cls(tuple(shared_sets(bundle)), note=f"{UNREADABLE}: {error}")
        sets = tuple(row for row in log if "set" in row)
        tensors = {query.id: query.tensors for query in bundle.queries}
        if not all(_is_shared(tensors, row["kept"]) for row in sets):
            return cls(tuple(shared_sets(bundle)), note=OTHER_LOG)
        if not sets and (equal := shared_sets(bundle)):
            return cls(tuple(equal), note=EQUAL)
        repairs = tuple(row for row in log if "repair" in row)
        return cls(sets, repairs, tuple(row for row in log if "width" in row))

    def to_json(self) -> dict[str, Any]:
        """The keys that `gemel bundle show --json` gets from it."""
        return {
            "sets": list(self.sets), "repairs": list(self.repairs), "widths": list(self.widths),
            "source": self.note or "log",
        }  # fmt: skip

    def to_text(self, every_set: bool = False) -> str:
        """A table of the sets, equal outcomes in one line unless `every_set`, and the repairs."""
        parts = (
            [_set_table(self.sets) if every_set else _outcome_table(self.sets)] if self.sets else ["nothing is shared"]
        )
        if self.note:
            parts.append(self.note)
        elif self.sets:
            spent = sum(row["flops"] / row["together"] for row in self.sets)
            parts.append(f"{len(self.sets)} sets of layers could be shared; trying them took {spent:.3g} FLOPs")
        parts += _repair_lines(self.repairs)
        if self.widths:
            widened = sum(len(row["widened"]) for row in self.widths)
            parts.append(f"stored {self.widths[-1]['width']}: {widened} weights wider{_blocking_queries(self.widths)}")
        return "\n".join([parts[0], *map(one_line, parts[1:])])

    def why_nothing(self) -> str:
        """Why nothing is shared, in one line; empty where something is."""
        if any(row["kept"] for row in self.sets):
            return ""
        if not self.sets:
            return "nothing is shared: no two models have a layer in common that saves enough"
        reasons = {query: row for row in self.sets for query in row["in_the_way"]}
        found = "; ".join(dict.fromkeys(map(_blocked_by, reasons.values())))
        return f"nothing is shared, every model is its original: {found or 'no set of layers was tried to the end'}"


def shared_sets(bundle: Bundle) -> list[dict[str, Any]]:
    """The sets that share a weight, from the manifest, as log rows without what only a log knows."""
    rows = []
    for one in bundle.manifest.shared:
        members = [[query, key[:-WEIGHT]] for query, key in one.members if key.endswith("weight")]
        if len(bundle.header.entries[one.tensor].shape) < 2 or len(members) < 2:
            continue
        nbytes = bundle.nbytes(one.tensor)
        rows.append({
            "set": members, "bytes": nbytes, "outcome": "kept", "kept": members, "in_the_way": {},
            "saved_bytes": nbytes * (len(members) - 1), "flops": None, "together": None,
        })  # fmt: skip
    return rows


def _is_shared(tensors: Mapping[str, Mapping[str, str]], kept: Sequence[Sequence[str]]) -> bool:
    """Whether these members use one tensor."""
    names = set()
    for query, path in kept:
        own = tensors.get(query, {})
        names.add(own.get(weight_key(own, path)))
    return len(names) <= 1 and None not in names


def _outcome_table(sets: Sequence[Row]) -> str:
    """One line for all sets of one outcome, with the same queries and the same reason."""
    alike: dict[tuple[str, str, str], list[Row]] = {}
    for row in sets:
        alike.setdefault((OUTCOME_WORDS[row["outcome"]], _set_queries(row), _blocked_by(row)), []).append(row)
    lines = [
        (len(rows), outcome, queries, size(sum(row["bytes"] for row in rows)),
         size(sum(row["saved_bytes"] for row in rows)), reason)
        for (outcome, queries, reason), rows in sorted(alike.items(), key=lambda one: _order(one[1]))
    ]  # fmt: skip
    return table(("sets", "outcome", "queries", "weights", "saved", "blocked by"), lines)


def _set_table(sets: Sequence[Row]) -> str:
    lines = [
        (
            size(row["bytes"]),
            OUTCOME_WORDS[row["outcome"]],
            _layer(row),
            _set_queries(row),
            size(row["saved_bytes"]),
            _blocked_by(row),
        )
        for row in sorted(sets, key=lambda row: _order([row]))
    ]
    return table(("weight", "outcome", "layer", "queries", "saved", "blocked by"), lines)


def _order(rows: Sequence[Row]) -> tuple[int, int]:
    return list(OUTCOME_WORDS.values()).index(OUTCOME_WORDS[rows[0]["outcome"]]), -sum(
        row["saved_bytes"] or row["bytes"] for row in rows
    )


def _layer(row: Row) -> str:
    """The layer's path; where members have several, the first and their number."""
    paths = list(dict.fromkeys(path for _, path in row["set"]))
    return paths[0] + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")


def _set_queries(row: Row) -> str:
    """The queries that share, and those of the set that do not."""
    kept = list(dict.fromkeys(query for query, _ in row["kept"]))
    proposed = list(dict.fromkeys(query for query, _ in row["set"]))
    without = [query for query in proposed if query not in kept]
    return _join(kept) + (f", without {_join(without)}" if without else "") if kept else _join(proposed)


def _blocked_by(row: Row) -> str:
    found = [
        f"{query}: {percent(reason['ratio'])} of {percent(reason['required'])} after {reason['after']}"
        for query, reason in row["in_the_way"].items()
    ]
    return "; ".join(found[:2]) + (f"; and {len(found) - 2} more" if len(found) > 2 else "")


def _repair_lines(rows: Sequence[Row]) -> list[str]:
    """One line for each repaired query: the steps, and the ratio after each."""
    steps: dict[str, list[str]] = {}
    required = {}
    for row in rows:
        query, step = row["query"], row["repair"]
        required[query] = row["required"]
        steps.setdefault(query, []).append(step + (f" {number(row['ratio'])}" if "ratio" in row else ""))
    return [f"{query} ({number(required[query])} required): {', '.join(own)}" for query, own in steps.items()]


def _blocking_queries(rows: Iterable[Row]) -> str:
    queries = list(dict.fromkeys(query for row in rows for query in row.get("in_the_way", ())))
    return f"; blocked by {_join(queries)}" if queries else ""


def _join(names: Sequence[str]) -> str:
    return ", ".join(names[:MAX_NAMED]) + (f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else "")


def shared_tensors(bundle: Bundle) -> list[dict[str, Any]]:
    """Every weight that two or more layers use, with its size and those layers."""
    return [
        {
            "tensor": one.tensor,
            "bytes": bundle.nbytes(one.tensor),
            "shape": list(bundle.header.entries[one.tensor].shape),
            "members": [list(member) for member in one.members],
        }
        for one in bundle.manifest.shared
        if len(bundle.header.entries[one.tensor].shape) > 1
    ]


def byte_counts(bundle: Bundle) -> dict[str, Any]:
    """Bytes before and after, in all and by query, as stored.

    A tensor used by n queries counts 1/n for each (`shared_part`), so the parts of all queries add up to `after`.
    """
    users: dict[str, set[str]] = {}
    for query in bundle.queries:
        for name in query.places().values():
            users.setdefault(name, set()).add(query.id)
    rows = []
    for query in bundle.queries:
        names = set(query.tensors.values())
        rows.append({
            "query": query.id,
            "model": query.model,
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
    """A bundle, its bytes, and the outcomes of its merge."""

    bundle: Bundle
    bytes: dict[str, Any]
    outcomes: MergeOutcomes

    def to_json(self) -> dict[str, Any]:
        """The keys of `gemel bundle show --json`."""
        manifest = self.bundle.manifest
        return {
            "workload": manifest.workload,
            "method": manifest.method,
            "digest": self.bundle.digest,
            "bytes": self.bytes,
            "queries": [
                {"id": query.id, "camera": query.camera, "task": query.task, "classes": query.classes,
                 "model": query.model, "input_size": query.input_size, "fps": query.fps, "sla_ms": query.sla_ms,
                 "accuracy_target": query.accuracy_target, "evidence": query.evidence,
                 "precision": _precision(query)}
                for query in self.bundle.queries
            ],
            "shared": shared_tensors(self.bundle),
            **self.outcomes.to_json(),
        }  # fmt: skip

    def to_text(self, every_set: bool = False) -> str:
        """Tables of the queries and of the sets; the sets one by one on demand."""
        counts, manifest = self.bytes, self.bundle.manifest
        rows = [
            (row["query"], row["model"], size(row["before"]), size(row["private"]), size(row["shared_part"]),
             _precision(query) or "-", _evidence(query.evidence))
            for row, query in zip(counts["queries"], self.bundle.queries, strict=True)
        ]  # fmt: skip
        headers = ("query", "model", "original", "private", "shared (its part)", "trained in",
                   "against the original")  # fmt: skip
        return "\n".join([
            table(headers, rows),
            "",
            one_line(f"{manifest.workload}, method {manifest.method}")
            + f": {size(counts['before'])} became {size(counts['after'])}, "
            f"{percent(counts['saved_fraction'])} saved (ceiling {percent(counts['ceiling_fraction'])})",
            "stored as " + ", ".join(f"{dtype} {size(nbytes)}" for dtype, nbytes in counts["stored"].items()),
            "",
            self.outcomes.to_text(every_set),
            "",
            f"SHA-256 {self.bundle.digest}",
        ])  # fmt: skip


def summarize_bundle(bundle: Bundle) -> BundleSummary:
    """Summarize a bundle and the log beside it."""
    return BundleSummary(bundle, byte_counts(bundle), MergeOutcomes.of(bundle))


def _precision(query: BundleQuery) -> str | None:
    return query.trained.precision if query.trained is not None else None


def _evidence(evidence: Any) -> str:
    if evidence is None:
        return "no evidence in the bundle"
    return f"{number(evidence['original'])} -> {number(evidence['merged'])} {evidence['metric']}"
