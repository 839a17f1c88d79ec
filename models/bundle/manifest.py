"""The bundle's manifest: queries, tensors, sharing, bytes; read from untrusted JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import ConfigDict, Field, JsonValue, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from models.bits import FACTORS, LOW_RANK, WIDE_CODE, Bits
from models.bundle.format import ITEM_BYTES, MAX_BYTES, Entry, Fault, loads_strict
from models.errors import InputError
from models.io import MAX_QUERIES, Fps, Priority, SlaMs
from models.preprocess import FURTHEST_PIXEL, Preprocess

if TYPE_CHECKING:
    from models.workload import Query


FORMAT, PACKED_FORMAT = 1, 2
"""A bundle is of format 2 when it holds tensors that are stored packed, else of format 1."""
MANIFEST_KEY = "gemel.manifest"
RESIDUAL_A, RESIDUAL_B = "residual_a", "residual_b"
SCALE = "scale"
NESTING = 2
"""Of lists in the arguments of a zoo model: anchors are a list of pairs."""

Id = Annotated[str, Field(max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
TensorName = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
ParameterPath = Annotated[str, Field(max_length=500, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.:-]*$")]
ModelName = Annotated[str, Field(max_length=300, pattern=r"^[A-Za-z_][A-Za-z0-9_.-]*(:[A-Za-z_][A-Za-z0-9_]*)?$")]
Count = Annotated[int, Field(ge=0, le=MAX_BYTES)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Text = Annotated[str, Field(min_length=1, max_length=1000)]


@dataclass(frozen=True)
class ByteCounts:
    """Bytes of the originals one by one, of the bundle's unique tensors, and what sharing between models could
    have saved at most.
    """

    before: Count
    after: Count
    ceiling: Count


@dataclass(frozen=True)
class ResidualTensors:
    """A residual's rank and the names of its tensors: the weight in use is shared + b.a."""

    rank: Annotated[int, Field(ge=1, le=1 << 20)]
    a: TensorName
    b: TensorName


@dataclass(frozen=True)
class StoredTensor:
    """How a tensor is stored where the architecture wants float32 (models.quantization).

    Codes name their scale's tensor, and those of less than a byte the shape of what they are widened to.
    """

    dtype: Bits
    scale: TensorName | None = None
    shape: Annotated[tuple[Annotated[int, Field(ge=1, le=1 << 40)], ...], Field(min_length=2, max_length=8)] | None = (
        None
    )


@dataclass(frozen=True)
class Trained:
    """How a query's model was trained when it was merged: the precision of its passes."""

    precision: Literal["fp32", "tf32", "bf16"]


class BundleEvidence(TypedDict):
    """Accuracy on the test split as DESIGN names it; further plain keys (chance_corrected, map ...) may
    stand beside.
    """

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    metric: Text
    split: Text
    samples: Count
    original: float | None
    merged: float | None
    ratio: float | None
    ci95: tuple[float | None, float | None] | None
    certain: bool | None


@dataclass(frozen=True)
class BundleQuery:
    """One query of a bundle: what it asks, how its model is built, which tensors it is bound to, how well it
    does.

    `tensors` maps state_dict keys of the plain architecture to tensor names, layer by layer; `residuals` maps
    layer paths; `stored` maps those state_dict keys whose tensors are packed. `fps` None means the camera's own.
    `threshold` is the score threshold chosen on val (detection); `trained` None means that no merge trained the model.
    `roi`, `min_score`, `priority`, `threshold`, `stored` and `trained` are ours beyond DESIGN, and optional when read.
    """

    id: Id
    camera: Id
    task: Literal["classification", "detection"]
    classes: Annotated[tuple[Text, ...], Field(min_length=1, max_length=100_000)]
    model: ModelName
    model_args: dict[str, JsonValue] = field(hash=False)
    input_size: Annotated[int, Field(ge=1, le=4096)]
    preprocess: Preprocess
    fps: Fps | None
    sla_ms: SlaMs
    accuracy_target: Annotated[float, Field(gt=0, le=1)]
    tensors: dict[ParameterPath, TensorName] = field(default_factory=dict, hash=False)
    residuals: dict[ParameterPath, ResidualTensors] = field(default_factory=dict, hash=False)
    stored: dict[ParameterPath, StoredTensor] = field(default_factory=dict, hash=False)
    evidence: BundleEvidence | None = field(default=None, hash=False)
    roi: tuple[float, float, float, float] | None = None
    min_score: Fraction = 0.0
    priority: Priority = 1
    threshold: Fraction | None = None
    trained: Trained | None = None

    @classmethod
    def of(
        cls,
        query: Query,
        evidence: Mapping[str, Any] | None = None,
        threshold: float | None = None,
        precision: Literal["fp32", "tf32", "bf16"] | None = None,
    ) -> BundleQuery:
        """The bundle's record of a workload's query; `write_bundle` fills in tensors and residuals.

        `evidence` holds the keys of BundleEvidence; numbers that are not finite become null. Raises
        InputError for a query that a manifest has no room for, so call it once before the work starts, too.
        """
        from models.zoo import preprocess_of

        record = cls(
            id=query.id, camera=query.camera, task=query.task, classes=tuple(query.classes),  # type: ignore[arg-type]
            model=query.model, model_args=dict(query.model_args), input_size=query.input_size,
            preprocess=preprocess_of(query.model, query.input_size), fps=query.fps, sla_ms=query.sla_ms,
            accuracy_target=query.accuracy_target, evidence=None if evidence is None else _finite(evidence),
            roi=query.roi, min_score=query.min_score, priority=query.priority, threshold=threshold,
            trained=Trained(precision) if precision is not None else None,
        )  # fmt: skip
        try:
            _QUERY.validate_json(json.dumps(dataclasses.asdict(record), allow_nan=False), strict=True)
            _check_query(record, "")
        except (ValueError, TypeError) as error:
            fault = _first(error) if isinstance(error, ValidationError) else str(error).removeprefix(".")
            raise InputError(f"query {query.id}", fault, "correct the workload") from error
        return record

    def state(self) -> dict[str, str]:
        """Every state_dict key with residuals attached (`LAYER.residual_a`, `LAYER.residual_b`) -> tensor
        name.
        """
        state: dict[str, str] = {}
        waiting = dict(self.residuals)
        for path, name in self.tensors.items():
            state[path] = name
            layer = path.rpartition(".")[0]
            if path.endswith(".weight") and layer in waiting:
                state.update(_residual_state(layer, waiting.pop(layer)))
        for layer, residual in waiting.items():
            state.update(_residual_state(layer, residual))
        return state

    def places(self) -> dict[str, str]:
        """Every place of a tensor: those of `state`, and `KEY.scale` right after the key of a tensor with a scale."""
        places: dict[str, str] = {}
        for key, name in self.state().items():
            places[key] = name
            own = self.stored.get(key)
            if own is not None and own.scale is not None:
                places[f"{key}.{SCALE}"] = own.scale
        return places


@dataclass(frozen=True)
class Shared:
    """A tensor that stands at two or more places, of one query or of several: (query id, state_dict key)."""

    tensor: TensorName
    members: tuple[tuple[Id, ParameterPath], ...]


@dataclass(frozen=True)
class Manifest:
    """Everything a bundle says about its tensors."""

    format: Literal[1, 2]
    workload: Id
    method: Id
    bytes: ByteCounts
    queries: Annotated[tuple[BundleQuery, ...], Field(min_length=1, max_length=MAX_QUERIES)]
    shared: tuple[Shared, ...]

    def to_json(self) -> str:
        """The text that stands under `gemel.manifest`."""
        document = dataclasses.asdict(self)
        for query in document["queries"]:
            for key in ("stored", "trained"):
                if not query[key]:
                    del query[key]
            for own in query.get("stored", {}).values():
                if own["shape"] is None:
                    del own["shape"]
        return json.dumps(document, allow_nan=False, separators=(",", ":"))


def format_of(queries: Iterable[BundleQuery]) -> Literal[1, 2]:
    """The format of a bundle of these queries."""
    return PACKED_FORMAT if any(query.stored for query in queries) else FORMAT


def shared_of(queries: tuple[BundleQuery, ...]) -> tuple[Shared, ...]:
    """Which tensors stand at two or more places, in order of first use."""
    members: dict[str, list[tuple[str, str]]] = {}
    for query in queries:
        for path, name in query.places().items():
            members.setdefault(name, []).append((query.id, path))
    return tuple(Shared(name, tuple(who)) for name, who in members.items() if len(who) > 1)


def parse_manifest(text: str) -> Manifest:
    """Read an untrusted manifest; a type, range or format that does not fit raises Fault, naming the key."""
    document = loads_strict(text.encode(), "the manifest")
    found = document.get("format") if isinstance(document, dict) else FORMAT
    if type(found) is not int or found not in (FORMAT, PACKED_FORMAT):  # True and 1.0 equal 1, too
        given = str(found)[:20]
        raise Fault(f"unknown format {given!r}; this version reads formats {FORMAT} and {PACKED_FORMAT}")
    try:
        manifest = _MANIFEST.validate_json(text, strict=True)
    except ValidationError as error:
        raise Fault(_first(error)) from None
    if manifest.format != format_of(manifest.queries):
        given = "no tensor is" if manifest.format == PACKED_FORMAT else "tensors are"
        raise Fault(f"format: {manifest.format}, but {given} stored packed")
    ids: set[str] = set()
    for index, query in enumerate(manifest.queries):
        _check_query(query, f"queries[{index}] ({query.id})")
        if not query.tensors:
            raise Fault(f"queries[{index}].tensors: none")
        if query.id in ids:
            raise Fault(f"queries[{index}].id: '{query.id}' stands twice")
        ids.add(query.id)
    return manifest


def _check_query(query: BundleQuery, where: str) -> None:
    """What a type alone cannot say."""
    mean, std = query.preprocess.mean, query.preprocess.std
    if query.preprocess.input_size != query.input_size:
        raise Fault(f"{where}.preprocess: its input_size is not the query's")
    if not all(math.isfinite(value) for value in (*mean, *std)) or min(std) <= 0:
        raise Fault(f"{where}.preprocess: mean and std must be finite, std above zero")
    if len(set(query.classes)) < len(query.classes):
        raise Fault(f"{where}.classes: a class stands twice")
    if query.roi is not None and not all(
        0 <= low < high < FURTHEST_PIXEL for low, high in zip(query.roi[:2], query.roi[2:])
    ):
        raise Fault(f"{where}.roi: empty or negative, or beyond {FURTHEST_PIXEL:,.0f} pixels")
    args = dict(query.model_args)
    ranks = args.pop(LOW_RANK, {})
    if not isinstance(ranks, dict) or not all(type(rank) is int and rank > 0 for rank in ranks.values()):
        raise Fault(f"{where}.model_args.{LOW_RANK}: no mapping of layer paths to ranks")
    if ":" not in query.model and not all(_is_plain(value, NESTING) for value in args.values()):
        raise Fault(f"{where}.model_args: only plain values, and lists and pairs of them")


def _residual_state(layer: str, residual: ResidualTensors) -> dict[str, str]:
    return {f"{layer}.{RESIDUAL_A}": residual.a, f"{layer}.{RESIDUAL_B}": residual.b}


def _is_plain(value: Any, depth: int) -> bool:
    """Whether a value is no mapping, and a list of such values at most so deep."""
    if isinstance(value, list):
        return depth > 0 and all(_is_plain(item, depth - 1) for item in value)
    return not isinstance(value, dict)


def _finite(value: Any) -> Any:
    """Plain JSON of a value: numbers that are not finite become None."""
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _first(error: ValidationError) -> str:
    """`queries[2].sla_ms: what is wrong`, the first of several."""
    fault = error.errors(include_url=False)[0]
    key = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in fault["loc"])
    return f"{key.removeprefix('.')[:200] or 'the manifest'}: {fault['msg']}"


_MANIFEST = TypeAdapter(Manifest)
_QUERY = TypeAdapter(BundleQuery)


def count_bytes(queries: Iterable[BundleQuery], entries: Mapping[str, Entry], ceiling_bytes: int) -> ByteCounts:
    """before = the sum over queries of `original_bytes`; after = all unique tensors, residuals and scales included."""
    before = 0
    unique: set[str] = set()
    for query in queries:
        before += original_bytes(query, entries)
        unique.update(query.places().values())
    return ByteCounts(before, sum(entries[name].nbytes for name in unique), ceiling_bytes)


def original_bytes(query: BundleQuery, entries: Mapping[str, Entry]) -> int:
    """Bytes of a query's original: every place of its plain architecture has a tensor of its own there, stored wide.

    However the bundle came by what stands at a place: shared within the model, or a layer as two factors.
    """
    total = sum(
        math.prod(wide_shape(query, key, entries[name])) * ITEM_BYTES[wide_code(query, key, entries[name])]
        for key, name in query.tensors.items()
    )
    for path in query.model_args.get(LOW_RANK, {}):  # type: ignore[union-attr]
        keys = [f"{path}.{factor}.weight" for factor in FACTORS]
        found = [entries.get(query.tensors.get(key, "")) for key in keys]
        a, b = (() if entry is None else wide_shape(query, key, entry) for key, entry in zip(keys, found, strict=True))
        if a and b and found[0] is not None:
            factors = math.prod(a) + math.prod(b)
            total += (b[0] * math.prod(a[1:]) - factors) * ITEM_BYTES[wide_code(query, keys[0], found[0])]
    return total


def wide_code(query: BundleQuery, key: str, entry: Entry) -> str:
    """The dtype (its code) in which the tensor at a state_dict key is used, however it is stored."""
    return WIDE_CODE if key in query.stored else entry.dtype


def wide_shape(query: BundleQuery, key: str, entry: Entry) -> tuple[int, ...]:
    """The shape in which the tensor at a state_dict key is used, however it is stored."""
    own = query.stored.get(key)
    return entry.shape if own is None or own.shape is None else own.shape
