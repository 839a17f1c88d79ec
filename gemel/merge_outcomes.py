"""The log of a merge as it is read again: rows of every kind that is shown, checked; others are passed over.

What became of each set of layers in a merge, as the log beside a bundle tells it, or the bundle alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from gemel.text import number, percent, size, table
from models.bundle import Bundle
from models.errors import InputError, one_line
from models.io import Exact, read_json_lines, validate
from models.sharing.layers import weight_key

SET_OUTCOMES = ("kept", "partly", "refused", "untried")
"""In the order in which they are shown."""
MAX_LOG_BYTES, MAX_LOG_LINES, MAX_LOG_LINE_BYTES = 2**26, 50_000, 2**23

_Bytes = Annotated[int, Field(ge=0, le=2**50)]
_Saved = Annotated[int, Field(ge=-(2**50), le=2**50)]
_Flops = Annotated[float, Field(ge=0, le=1e30)]
_Ratio = Annotated[float, Field(ge=-1e9, le=1e9)] | None
_Member = Annotated[tuple[str, str], Field(strict=False)]


class _Row(Exact, extra="allow"):
    """Other keys are for whoever reads the log, not for us."""


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


class _Waiting(_Row):
    waits: str
    after: str
    required: _Ratio
    ratio: _Ratio = None


class _Alone(_Row):
    alone: str
    required: _Ratio
    ratio: _Ratio = None


class _Widths(_Row):
    width: str
    widened: list[str]
    in_the_way: list[str]


_KINDS = {"set": _Set, "alone": _Alone, "waits": _Waiting, "repair": _Repaired, "width": _Widths}
"""By the key that only rows of this kind have."""


def read_merge_log(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a log, as they stand there; InputError, which names the line, for what no merge can have written."""
    for number, row in read_json_lines(path, "", MAX_LOG_BYTES, MAX_LOG_LINE_BYTES, torn=False):
        if number > MAX_LOG_LINES:
            raise InputError(path, f"has more than {MAX_LOG_LINES} lines")
        for key, kind in _KINDS.items():
            if key in row:
                validate(f"{path}: line {number}", row, kind)
        yield row


LOG_SUFFIX = ".log.jsonl"
NO_LOG = "no log beside the bundle: what was tried and refused is not known, only what is shared"
OTHER_LOG = "the log beside the bundle is another merge's: only what is shared is known"
EQUAL = "the merge set out to share nothing: what is shared was equal before"
UNREADABLE = "only what is shared is known: the log beside the bundle cannot be believed"
WEIGHT = len(".weight")
"""What follows a layer's path in the key of its weight; `_weight` is as long."""
NAMED = 4
Row = Mapping[str, Any]


@dataclass(frozen=True)
class MergeOutcomes:
    """The rows of the sets (merger.outcomes), those of the repairs, and of the widths.

    `note` says why there is no more than what the bundle itself tells; empty where the log was found.
    """

    sets: tuple[Row, ...]
    repairs: tuple[Row, ...] = ()
    widths: tuple[Row, ...] = ()
    note: str = ""

    @classmethod
    def of(cls, bundle: Bundle) -> MergeOutcomes:
        """From the log beside the bundle, if that is its own, else from its manifest."""
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
        repairs = tuple(row for row in log if {"repair", "alone", "waits"} & row.keys())
        return cls(sets, repairs, tuple(row for row in log if "width" in row))

    def to_json(self) -> dict[str, Any]:
        """The keys that `gemel bundle show --json` gets from it."""
        return {
            "sets": list(self.sets), "repairs": list(self.repairs), "widths": list(self.widths),
            "source": self.note or "log",
        }  # fmt: skip

    def to_text(self, every_set: bool = False) -> str:
        """A table of the sets, those of one fate in one line unless every set is asked for, and what was repaired."""
        parts = [_every(self.sets) if every_set else _summary(self.sets)] if self.sets else ["nothing is shared"]
        if self.note:
            parts.append(self.note)
        elif self.sets:
            spent = sum(row["flops"] / row["together"] for row in self.sets)
            parts.append(f"{len(self.sets)} sets of layers were to be shared; trying them took {spent:.3g} FLOPs")
        parts += _repairs(self.repairs)
        if self.widths:
            widened = sum(len(row["widened"]) for row in self.widths)
            parts.append(f"stored {self.widths[-1]['width']}: {widened} weights wider" + _in_whose_way(self.widths))
        return "\n".join([parts[0], *map(one_line, parts[1:])])

    def why_nothing(self) -> str:
        """Why nothing is shared, in one line; empty where something is."""
        if any(row["kept"] for row in self.sets):
            return ""
        if not self.sets:
            return "nothing is shared: no two models have a layer in common that saves enough"
        reasons = {query: row for row in self.sets for query in row["in_the_way"]}
        found = "; ".join(dict.fromkeys(_in_the_way(row) for row in reasons.values()))
        return f"nothing is shared, every model is its original: {found or 'no set of layers was tried to the end'}"


def shared_sets(bundle: Bundle) -> list[dict[str, Any]]:
    """The sets that share a weight, by the manifest: the rows of `merger.outcomes` without what only a log
    knows.
    """
    rows = []
    for one in bundle.manifest.shared:
        members = [[query, key[:-WEIGHT]] for query, key in one.members if key.endswith("weight")]
        if len(bundle.header.entries[one.tensor].shape) < 2 or len(members) < 2:
            continue
        nbytes = bundle.nbytes(one.tensor)
        rows.append({
            "set": members, "bytes": nbytes, "outcome": "kept", "kept": members,
            "in_the_way": {}, "saved_bytes": nbytes * (len(members) - 1), "flops": None,
            "together": None,
        })  # fmt: skip
    return rows


def _is_shared(tensors: Mapping[str, Mapping[str, str]], kept: Sequence[Sequence[str]]) -> bool:
    """Whether these members use one tensor."""
    names = set()
    for query, path in kept:
        own = tensors.get(query, {})
        names.add(own.get(weight_key(own, path)))
    return len(names) <= 1 and None not in names


def _summary(sets: Sequence[Row]) -> str:
    """The sets of one outcome, with the same queries and the same ones in the way, in one line."""
    alike: dict[tuple[str, str, str], list[Row]] = {}
    for row in sets:
        alike.setdefault((row["outcome"], _queries(row), _in_the_way(row)), []).append(row)
    lines = [
        (len(rows), outcome, queries, size(sum(row["bytes"] for row in rows)),
         size(sum(row["saved_bytes"] for row in rows)), why)
        for (outcome, queries, why), rows in sorted(alike.items(), key=lambda one: _order(one[0][0], one[1]))
    ]  # fmt: skip
    return table(("sets", "outcome", "queries", "weights", "saved", "in the way"), lines)


def _every(sets: Sequence[Row]) -> str:
    lines = [
        (size(row["bytes"]), row["outcome"], _layer(row), _queries(row), size(row["saved_bytes"]), _in_the_way(row))
        for row in sorted(sets, key=lambda row: _order(row["outcome"], [row]))
    ]  # fmt: skip
    return table(("weight", "outcome", "layer", "queries", "saved", "in the way"), lines)


def _order(outcome: str, rows: Iterable[Row]) -> tuple[int, int]:
    return SET_OUTCOMES.index(outcome), -sum(row["saved_bytes"] or row["bytes"] for row in rows)


def _layer(row: Row) -> str:
    """The layer's path; where members have it elsewhere, the first and how many."""
    paths = list(dict.fromkeys(path for _, path in row["set"]))
    return paths[0] + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")


def _queries(row: Row) -> str:
    """Who shares, and who does not though it was to."""
    kept = list(dict.fromkeys(query for query, _ in row["kept"]))
    meant = list(dict.fromkeys(query for query, _ in row["set"]))
    without = [query for query in meant if query not in kept]
    return _listed(kept) + (f", without {_listed(without)}" if without else "") if kept else _listed(meant)


def _in_the_way(row: Row) -> str:
    found = [
        f"{query}: {percent(why['ratio'])} of {percent(why['required'])} after {why['after']}"
        for query, why in row["in_the_way"].items()
    ]
    return "; ".join(found[:2]) + (f"; and {len(found) - 2} more" if len(found) > 2 else "")


def _repairs(rows: Sequence[Row]) -> list[str]:
    """One line for each query that was repaired: what was tried, and the ratio that it brought."""
    steps: dict[str, list[str]] = {}
    required = {}
    for row in rows:
        query = row.get("alone") or row.get("waits") or row["query"]
        what = "private parts alone" if "alone" in row else row.get("repair") or f"waits after {row['after']}"
        required[query] = row["required"]
        steps.setdefault(query, []).append(what + (f" {number(row['ratio'])}" if "ratio" in row else ""))
    return [f"{query} ({number(required[query])} required): {', '.join(own)}" for query, own in steps.items()]


def _in_whose_way(rows: Iterable[Row]) -> str:
    queries = list(dict.fromkeys(query for row in rows for query in row.get("in_the_way", ())))
    return f"; in the way: {_listed(queries)}" if queries else ""


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
