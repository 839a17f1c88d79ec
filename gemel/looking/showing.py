"""What a bundle holds: its queries and bytes, how they are stored, and what became of each set of layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gemel.looking.footprint import bytes_of, shared_of
from gemel.looking.outcomes import Outcomes
from gemel.text import number, percent, size, table
from models.bundle import Bundle, BundleQuery
from models.errors import one_line


@dataclass(frozen=True)
class Shown:
    """A bundle, its bytes (gemel.looking.footprint) and what became of its sets."""

    bundle: Bundle
    bytes: dict[str, Any]
    outcomes: Outcomes

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
            "shared": shared_of(self.bundle),
            **self.outcomes.to_json(),
        }  # fmt: skip

    def to_text(self, every_set: bool = False) -> str:
        """Tables of the queries and of the sets; the sets one by one on demand."""
        counts, manifest = self.bytes, self.bundle.manifest
        rows = [
            (row["query"], row["model"], size(row["before"]), size(row["private"]), size(row["shared_part"]),
             size(row["residual"]), _precision(query) or "-", _evidence(query.evidence))
            for row, query in zip(counts["queries"], self.bundle.queries, strict=True)
        ]  # fmt: skip
        headers = ("query", "model", "original", "private", "its part shared", "residual", "trained in",
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


def shown(bundle: Bundle) -> Shown:
    """Look at a bundle, and at the log beside it."""
    return Shown(bundle, bytes_of(bundle), Outcomes.of(bundle))


def _precision(query: BundleQuery) -> str | None:
    return query.trained.precision if query.trained is not None else None


def _evidence(evidence: Any) -> str:
    if evidence is None:
        return "no evidence in the bundle"
    return f"{number(evidence['original'])} -> {number(evidence['merged'])} {evidence['metric']}"
