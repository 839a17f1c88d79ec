"""Where a bundle's bytes lie: what each query brings, what is shared, what its models really take in memory.

What a bundle holds: its queries and bytes, how they are stored, and what became of each set of layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gemel.merge_outcomes import MergeOutcomes
from gemel.text import number, percent, size, table
from models.bits import FP32, WEIGHTS
from models.bundle import Bundle, BundleQuery
from models.bundle.manifest import original_bytes
from models.errors import one_line


def shared_tensors(bundle: Bundle) -> list[dict[str, Any]]:
    """Every weight that stands at two or more places, with its size and who uses it where."""
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
    """How the bytes of the weights are stored: dtype (fp32, fp16, int8 ...) -> bytes, scales with what they scale."""
    found = {dtype: dict[str, int]() for dtype in WEIGHTS}
    for query in bundle.queries:
        for key, name in query.tensors.items():
            own = query.stored.get(key)
            found[own.dtype if own is not None else FP32][name] = bundle.nbytes(name)
            if own is not None and own.scale is not None:
                found[own.dtype][own.scale] = bundle.nbytes(own.scale)
    return {dtype: sum(sizes.values()) for dtype, sizes in found.items() if sizes}


def measure_resident_bytes(bundle: Bundle) -> int:
    """Bytes of the unique memory behind all queries' models, built side by side; packed weights as a box holds them."""
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
    """A bundle, its bytes (gemel.bundle_summary) and what became of its sets."""

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
        headers = ("query", "model", "original", "private", "its part shared", "trained in",
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
    """Look at a bundle, and at the log beside it."""
    return BundleSummary(bundle, byte_counts(bundle), MergeOutcomes.of(bundle))


def _precision(query: BundleQuery) -> str | None:
    return query.trained.precision if query.trained is not None else None


def _evidence(evidence: Any) -> str:
    if evidence is None:
        return "no evidence in the bundle"
    return f"{number(evidence['original'])} -> {number(evidence['merged'])} {evidence['metric']}"
