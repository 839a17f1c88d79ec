"""What `benchmarks/merging/merge.py` keeps of one merge (a cell: workload, target, arm, seed), and what can be
read from it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from gemel.models.bits import FP32
from gemel.models.sharing.plan import SharingPlan

Step = tuple[float, float]
EQUAL = 1e-3
"""Two merges save the same when they differ by less than this part of the ceiling: small tensors that are equal by
chance (counters, zero biases) are stored once, too, and stand in a bundle's bytes but in no plan."""


class Weight(NamedTuple):
    """A layer that could share, and the bytes of its weight."""

    query: str
    path: str
    bytes: int


@dataclass(frozen=True)
class Cell:
    """One merge: `result` is its report as JSON, `log` the rows of its log.

    `name` is the folder of the workload at this `target`; `asked` is what must be equal for a cell to count as done
    (options, the digest of the workload file and of its weights).
    """

    name: str
    workload: str
    target: float
    arm: str
    seed: int
    asked: dict[str, Any]
    machine: dict[str, Any]
    date: str
    weights: tuple[Weight, ...]
    result: dict[str, Any]
    log: tuple[dict[str, Any], ...]

    @property
    def label(self) -> str:
        """The arm, and the bits of its weights where these are not float32."""
        options = self.asked["options"]
        fewer = options["weights"] if options["weights"] != FP32 else ""
        return ", ".join(filter(None, (self.arm, fewer)))

    @property
    def saved_bytes(self) -> int:
        """Bytes that the bundle saves."""
        return self.result["bytes_before"] - self.result["bytes_after"]

    @property
    def ceiling_bytes(self) -> float:
        """Bytes that sharing every group would save."""
        return self.result["ceiling_fraction"] * self.result["bytes_before"]

    @property
    def share(self) -> float:
        """Bytes saved over the ceiling; 0 where nothing could be saved."""
        return self.saved_bytes / self.ceiling_bytes if self.ceiling_bytes else 0.0

    @property
    def queries(self) -> list[dict[str, Any]]:
        """How each query came out."""
        return self.result["queries"]

    @property
    def met(self) -> int:
        """Queries that reach their target on test, with an original that is evidence."""
        return sum(query["met"] and query["worth"] for query in self.queries)

    @property
    def proven(self) -> int | None:
        """Queries that are proven or unchanged; None where the record is older than such proofs."""
        states = [query.get("state") for query in self.queries]
        return None if None in states else sum(state != "not proven" for state in states)

    @property
    def agreement(self) -> float | None:
        """The mean part of answers that are the originals', of queries that changed; None in older records."""
        if any("agreement" not in query for query in self.queries):
            return None
        changed = [query["agreement"] for query in self.queries if (query["agreement"], query["ratio"]) != (1.0, 1.0)]
        return sum(changed) / len(changed) if changed else 1.0

    def accepted_steps(self) -> list[Step]:
        """(FLOPs, bytes saved by what was accepted by then), from (0, 0) on, ascending in both.

        A search accepts set by set, one log row each. `top-down` accepts after each step of its ladder. Every
        other arm accepts all at its end.
        """
        if any("members" in row for row in self.log):
            return [(0.0, 0.0), *_search_steps(self.log, self.weights)]
        keeps = any("recipe" in row for row in self.log)  # of the records that a validation accepted
        kinds = ("accepted_bytes", "best_bytes")
        accepted = [(row["flops"], float(row[kind])) for row in self.log for kind in kinds if kind in row]
        held = [(row["flops"], float(row["saved_bytes"])) for row in self.log if keeps and "epoch" in row]
        steps = [(0.0, 0.0)]
        for step in sorted([*accepted, *held]):
            if step[1] > steps[-1][1]:
                steps.append(step)
        return [*steps, (self.result["flops"], float(self.saved_bytes))]

    def flops_to(self, saved_bytes: float) -> float | None:
        """The FLOPs after which it had accepted about so many bytes; None where it never did."""
        enough = saved_bytes - EQUAL * self.ceiling_bytes
        return next((flops for flops, saved in self.accepted_steps() if saved >= enough), None)

    def write(self, folder: Path) -> Path:
        """Store it whole or not at all."""
        path = path_of(folder, self.name, self.arm, self.seed)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self), separators=(",", ":")) + "\n", encoding="utf-8")
        partial.replace(path)
        return path

    @classmethod
    def read(cls, path: Path) -> Cell:
        """Inverse of `write`."""
        found = json.loads(path.read_text(encoding="utf-8"))
        values = {field.name: found[field.name] for field in fields(cls)}
        weights = tuple(Weight(*row) for row in values["weights"])
        return cls(**{**values, "weights": weights, "log": tuple(values["log"])})


def path_of(folder: Path, name: str, arm: str, seed: int) -> Path:
    """Where a cell lies."""
    return folder / name / f"{arm}-seed{seed}.json"


def read_cells(folder: Path) -> list[Cell]:
    """All finished cells below a folder."""
    return [Cell.read(path) for path in sorted(folder.glob("*/*-seed*.json"))]


def _search_steps(log: Sequence[dict[str, Any]], weights: Sequence[Weight]) -> Iterator[Step]:
    """The steps at which a search's plan grew: a set counts when it is larger than each that it replaces."""
    plan = SharingPlan()
    for row in log:
        if "members" not in row:  # a row of something else than an attempt
            continue
        members, kept = ([tuple(member) for member in row[key]] for key in ("members", "kept"))
        replaced = [len(shared) for shared in plan.shared if set(shared) <= set(members)]
        if len(kept) > max(replaced, default=1):
            others = tuple(shared for shared in plan.shared if not set(shared) <= set(members))
            plan = SharingPlan(others).with_set(kept)
            yield row["flops"], float(plan.saved_bytes(weights))  # type: ignore[arg-type]
