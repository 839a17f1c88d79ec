"""What a workload's models weigh and could share, and which of its inputs are missing; needs no weights or footage."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from gemel.models.data import load_split
from gemel.models.errors import InputError, join_names
from gemel.models.files.io import is_path
from gemel.models.files.published import Published
from gemel.models.files.weights import check_weights, load_weights
from gemel.models.labels.layouts import SPLITS, Layout, find_layout
from gemel.models.measures.evaluation import evidence_hint, find_gap
from gemel.models.preprocess_check import SCORED_FRAMES, describe_preprocess_problem, score_original
from gemel.models.sharing.flop_rates import FlopRates, layers_by_query, whole_prefix_rates
from gemel.models.sharing.groups import Group, groups
from gemel.models.sharing.layers import Signature, layers_of_all, model_bytes
from gemel.models.sharing.similarity import ceiling_with_copies, copies, cosine_likeness
from gemel.models.tasks import task_of
from gemel.models.workload import Query, Workload
from gemel.models.zoo import build_query
from gemel.text import key_text, number, percent, size, table

MAX_GROUPS, MAX_NAMES = 12, 4
"""Groups in the text, and queries named for each."""
HEAVIEST_FRACTIONS = (0.5, 0.8)
TRAINED_SUFFIXES = (".safetensors", ".onnx")
INT8_BYTES = 1 / 4
"""Of float32; scales and what stays in float32 are left out."""
PAIRING_HELP = (
    "paired by: only = no model has this layer twice; position = networks aligned so that as many layers as possible "
    "meet in order; likeness = aligned with the most similar weights first"
)


@dataclass(frozen=True)
class Inspection:
    """Bytes of a workload's models and the groups they could share.

    `queries` are the rows of the JSON. `heaviest`: (layers, fraction of all bytes) for half and for 80 % of the bytes.
    `network_bytes` are saved if of each task the smallest network answered for all queries that may change theirs.
    `flops`: FLOPs a second at the queries' rates (1 a second where unknown), and the least that a common prefix of each
    camera's queries could leave. `alike`: queries that ask the same, so that one model may answer for all. `warnings`:
    missing or unfit inputs. `addition`: what the new queries would take on the box of a bundle.
    """

    workload: str
    signature: str
    queries: tuple[dict[str, Any], ...]
    total_bytes: int
    groups: tuple[Group, ...]
    ceiling_bytes: int
    network_bytes: int
    heaviest: tuple[tuple[int, float], ...]
    flops: FlopRates
    alike: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    addition: dict[str, Any] | None = None

    @property
    def ceiling_fraction(self) -> float:
        """Bytes saved if every group were shared, as a share of all bytes."""
        return self.ceiling_bytes / self.total_bytes if self.total_bytes else 0.0

    @property
    def network_fraction(self) -> float:
        """Bytes saved with one network for all of a task, as a share of all bytes; at least the ceiling's."""
        return max(self.ceiling_bytes, self.network_bytes) / self.total_bytes if self.total_bytes else 0.0

    def predict_savings(self) -> str:
        """What merging could save at most, by what it may change."""
        layers, network = self.ceiling_fraction, self.network_fraction
        kept = [layers, *([network] if network > layers else [])]
        texts = [f"layers alone: {percent(layers, 0)}"]
        texts += [f"with one network for all of a task: up to {percent(network, 0)}"] if network > layers else []
        int8 = " and ".join(percent(1 - (1 - saved) * INT8_BYTES, 0) for saved in kept)
        return f"could be saved: {'; '.join(texts)}; with weights in int8 up to {int8}"

    def to_json(self) -> dict[str, Any]:
        """The keys of `gemel inspect --json`."""
        return {
            "workload": self.workload,
            "signature": self.signature,
            "queries": list(self.queries),
            "total_bytes": self.total_bytes,
            "ceiling_bytes": self.ceiling_bytes,
            "ceiling_fraction": self.ceiling_fraction,
            "network_fraction": self.network_fraction,
            **self.flops.to_json(),
            "heaviest": [{"layers": count, "bytes_fraction": share} for count, share in self.heaviest],
            "groups": [
                {"signature": one.signature, "bytes": one.bytes, "members": [list(member) for member in one.members],
                 "saved_bytes": one.saved_bytes, "paired": one.paired}
                for one in self.groups
            ],
            "alike": list(self.alike),
            "notes": list(self.notes),
            "warnings": list(self.warnings),
            **({} if self.addition is None else {"addition": self.addition}),
        }  # fmt: skip

    def to_text(self) -> str:
        """The models, then the groups that save most, for a terminal."""
        heads = ["query", "model", "layers", "bytes", "in groups"]
        rows = [
            [q["id"], q["model"], str(q["layers"]), size(q["bytes"]), size(q["shareable_bytes"])] for q in self.queries
        ]
        if any("val" in query for query in self.queries):
            heads.append("original on val")
            for row, query in zip(rows, self.queries, strict=True):
                row.append(_describe_score(query))
        shown = [
            (size(one.saved_bytes), size(one.bytes), one.signature, one.paired,
             join_names([query for query, _ in one.members], MAX_NAMES))
            for one in self.groups[:MAX_GROUPS]
        ]  # fmt: skip
        more = len(self.groups) - len(shown)
        layers = sum(query["layers"] for query in self.queries)
        few = ", ".join(f"{percent(share, 0)} of the bytes in {count}" for count, share in self.heaviest)
        return "\n".join([
            *(f"{line}\n" for line in self.alike),
            table(heads, rows),
            "",
            f"{len(rows)} models, {size(self.total_bytes)}; {few} of {layers} layers",
            f"layer-sharing bound: {size(self.ceiling_bytes)} = {percent(self.ceiling_fraction)} of all bytes saved "
            f"if all {len(self.groups)} groups were shared ({self.signature} signatures)",
            self.predict_savings(),
            f"{self.flops.to_text()}{' at most' if self.flops.with_prefix < self.flops.alone else ''}",
            "",
            table(("saves", "weight", "signature", "paired by", "shared by"), shown) if shown else "no layers fit",
            *([f"... and {more} more groups"] if more > 0 else []),
            *([PAIRING_HELP] if any(group.paired != "only" for group in self.groups) else []),
            *self.notes,
            *([] if self.addition is None else _addition_lines(self.addition)),
        ])  # fmt: skip

    __repr__ = to_text


def _describe_score(row: Mapping[str, Any]) -> str:
    if "val" not in row:
        return "no labels"
    return f"{number(row['val'], 2)} {key_text(row['metric'])}, {row['val_frames']} frames"


def inspect_addition(workload: Workload, onto: str | Path) -> dict[str, Any]:
    """What stays of a bundle, what leaves, and the least bytes that each new query would take there."""
    from gemel.merger.addition import estimate_costs, freed_bytes, open_addition

    addition = open_addition(onto, workload)
    costs = [asdict(cost) for cost in estimate_costs(addition)]
    after = addition.bundle.manifest.bytes.after
    return {**addition.describe(), "bundle_bytes": after, "freed_bytes": freed_bytes(addition), "costs": costs}


def _addition_lines(addition: Mapping[str, Any]) -> list[str]:
    kept, new, removed = (len(addition[key]) for key in ("kept", "new", "removed"))
    before, freed = size(addition["bundle_bytes"]), size(addition["freed_bytes"])
    first = f"on {addition['onto']} ({before}): {kept} queries stay, {new} are new, {removed} leave, {freed} are freed"
    rows = [
        (cost["id"], size(cost["bytes"]), cost["lender"] or "-", size(cost["lender_bytes"]), cost["network"] or "-",
         size(cost["network_bytes"]))
        for cost in addition["costs"]
    ]  # fmt: skip
    heads = ("new query", "alone, fp32", "layers of", "then", "network of", "then")
    return ["", first, *([table(heads, rows)] if rows else [])]


def inspect_workload(
    workload: Workload, signature: Signature = "wide", weights: bool = False, onto: str | Path | None = None
) -> Inspection:
    """Describe the models of a workload and the groups they could share, and what is new for the bundle `onto`.

    With `weights` the weights files that exist are read: repeated layers are paired by similarity, a copy of
    another model is shared whole, and each original is scored on some frames of its labelled val.
    """
    layers = layers_of_all(workload.queries)
    states, scores, weak = {}, dict[str, dict[str, Any]](), list[str]()
    for query in workload.queries if weights else ():
        if query.weights is not None and query.weights.exists():
            model = load_weights(query, build_query(query))
            states[query.id] = model.state_dict()
            weak += _score_original(query, model, scores)
    twins = copies(states)
    found = groups(layers, signature, likeness=cosine_likeness(states) if weights else None)
    shareable = Counter[str]()
    for group in found:
        for query_id, _ in group.members:
            shareable[query_id] += group.bytes
    counts = Counter(layer.query for layer in layers)
    free = {layer.query for layer in layers if not layer.head}
    sizes = {query.id: model_bytes(query) for query in workload.queries}
    queries = tuple(
        {"id": query.id, "model": query.model, "layers": counts[query.id], "bytes": sizes[query.id],
         "shareable_bytes": shareable[query.id], **scores.get(query.id, {})}
        for query in workload.queries
    )  # fmt: skip
    notes = [f"{query}: its weights equal those of {other}, so all of it is shared" for query, other in twins.items()]
    notes += [
        f"{query.id}: {query.model} can share nothing: its head is its only convolution or linear layer"
        for query in workload.queries
        if query.id not in free
    ]
    return Inspection(
        workload=workload.name,
        signature=signature,
        queries=queries,
        total_bytes=sum(sizes.values()),
        groups=tuple(found),
        ceiling_bytes=ceiling_with_copies(layers, sizes, twins, signature),
        network_bytes=_network_bytes(workload, sizes),
        flops=whole_prefix_rates(
            workload.queries,
            {query.id: query.fps or 1.0 for query in workload.queries},
            layers_by_query(workload.queries),
        ),
        heaviest=_heaviest([layer.bytes for layer in layers], sum(sizes.values())),
        alike=tuple(_alike(workload, sizes)),
        notes=tuple(notes),
        addition=None if onto is None else inspect_addition(workload, onto),
        warnings=(*missing_inputs(workload), *(_missing_evidence(workload) if weights else ()), *weak),
    )


def _network_bytes(workload: Workload, sizes: Mapping[str, int]) -> int:
    """Bytes saved if of each task the smallest network answered for all queries that may change theirs."""
    by_task: dict[str, list[int]] = {}
    for query in workload.queries:
        if not query.keep_architecture:
            by_task.setdefault(query.task, []).append(sizes[query.id])
    return sum(sum(own) - min(own) for own in by_task.values())


def _alike(workload: Workload, sizes: Mapping[str, int]) -> Iterator[str]:
    """One line for each question that several queries ask, with the smallest of their models."""
    asking: dict[tuple[str, frozenset[str]], list[str]] = {}
    for query in workload.queries:
        if not query.keep_architecture:
            asking.setdefault((query.task, frozenset(query.classes)), []).append(query.id)
    for (_, classes), queries in asking.items():
        if len(queries) > 1:
            least = min(queries, key=lambda query: sizes[query])
            names, asked = join_names(queries, MAX_NAMES), join_names(sorted(classes), MAX_NAMES)
            yield (
                f"{names} ask the same ({asked}): if one model answers for all, {size(sizes[least])} instead of "
                f"{size(sum(sizes[query] for query in queries))} may do ({least}'s); `gemel merge` tries it"
            )


def _heaviest(layer_bytes: list[int], total: int) -> tuple[tuple[int, float], ...]:
    """The fewest layers that hold half, and 80 %, of all bytes."""
    sums, found = [0], {}
    for nbytes in sorted(layer_bytes, reverse=True):
        sums.append(sums[-1] + nbytes)
    for fraction in HEAVIEST_FRACTIONS:
        count = next((count for count, held in enumerate(sums) if count and held >= fraction * total), None)
        if count is not None:
            found[count] = sums[count] / total
    return tuple(found.items())


def missing_inputs(workload: Workload) -> tuple[str, ...]:
    """One line for each: the file, the key, what is wrong with it, what to do. Nothing is downloaded or decoded."""
    found: list[InputError] = []
    for camera in workload.cameras.values():
        if is_path(camera.source) and not os.path.exists(camera.source):
            key = f"cameras.{camera.id}.source"
            found.append(InputError(workload.path, f"{camera.source} does not exist", "correct the path", key))
    for query in workload.queries:
        found += [*_missing_weights(query, workload.path), *_missing_data(query, workload.path)]
    return tuple(map(str, found))


def _missing_evidence(workload: Workload) -> Iterator[str]:
    """The queries whose labels of val and test prove nothing; without labels it takes the original's answers."""
    for query in workload.queries:
        with contextlib.suppress(InputError):  # reported by missing_inputs
            if query.data is None or find_layout(query) is None:
                continue
            splits = [load_split(query, name) for name in SPLITS[1:]]
            if gap := next(filter(None, (find_gap(query, one, one.labels or ()) for one in splits)), ""):
                yield f"{query.id}: no evidence: {gap}; {evidence_hint(query)}"


def _score_original(query: Query, model: nn.Module, scores: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Put what an original reaches on its labelled val into `scores`; yield what that says about its preprocessing."""
    with contextlib.suppress(InputError):  # reported by missing_inputs
        if query.data is None or find_layout(query) is None:
            return
        val = load_split(query, "val")
        if val.labels is None:
            return
        reached, frames = score_original(query, model, val), min(len(val), SCORED_FRAMES)
        scores[query.id] = {"metric": task_of(query).metric, "val": reached, "val_frames": frames}
        if not find_gap(query, val, val.labels):
            text, remedy = describe_preprocess_problem(query, model, val, reached)
            if text:
                yield f"{query.id}: {text}; {remedy}"


def _missing_weights(query: Query, file: Path) -> Iterator[InputError]:
    key, hint = f"weights ({query.id})", "correct the path, or let `gemel train` write it"
    if query.weights is not None and Path(str(query.weights)).suffix not in TRAINED_SUFFIXES:
        hint = f"correct the path; `gemel train` writes {' or '.join(TRAINED_SUFFIXES)}"
    if query.weights is None:
        yield InputError(file, "none are named", "name a file: `gemel train` writes it, `gemel merge` reads it", key)
    elif isinstance(query.weights, Published):
        return
    elif not query.weights.exists():
        yield InputError(file, f"{query.weights} does not exist", hint, key)
    else:
        yield from _input_errors(lambda: check_weights(query, build_query(query, "meta")))


def _missing_data(query: Query, file: Path) -> Iterator[InputError]:
    key = f"data ({query.id})"
    if query.data is None:
        yield InputError(file, "no frames are named", "name a folder or a video: training and merging need it", key)
    elif not query.data.exists():
        yield InputError(file, f"{query.data} does not exist", "correct the path, or put frames there", key)
    else:
        found: list[Layout | None] = []
        yield from _input_errors(lambda: found.append(find_layout(query)))
        for split in SPLITS if any(found) else ():
            yield from _input_errors(lambda split=split: load_split(query, split))


def _input_errors(check: Callable[[], object]) -> Iterator[InputError]:
    try:
        check()
    except InputError as error:
        yield error
