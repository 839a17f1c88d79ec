"""The bundle's manifest: queries, tensors, sharing, bytes; read from untrusted JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import ConfigDict, Field, JsonValue, TypeAdapter, ValidationError
from typing_extensions import NotRequired, TypedDict

from gemel.models.bits import WIDE_CODE, Bits
from gemel.models.bundle.format import ITEM_BYTES, MAX_BYTES, Entry
from gemel.models.errors import InputError
from gemel.models.files.documents import ParseError, parse_json
from gemel.models.files.io import MAX_QUERIES, Agreement, Fps, Priority, SlaMs, finite
from gemel.models.preprocess import (
    FURTHEST_PIXEL,
    InputSize,
    Preprocess,
    Region,
    height_width,
    side_or_sides,
)
from gemel.models.tasks import TaskName, task_of

if TYPE_CHECKING:
    from gemel.models.workload import Query

FORMAT = 3
MANIFEST_KEY = "gemel.manifest"
GRAPH = "graph"
"""The `model` of a query whose network the bundle itself holds."""
MAX_GRAPH_BYTES = 64 << 20
SCALE = "scale"

Id = Annotated[str, Field(max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
TensorName = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
ParameterPath = Annotated[str, Field(max_length=500, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.:-]*$")]
ModelName = Annotated[
    str,
    Field(
        max_length=300, pattern=r"^(timm/|hf/)?[A-Za-z_][A-Za-z0-9_.-]*(:[A-Za-z_][A-Za-z0-9_]*)?$"
    ),
]
DecoderName = Annotated[str, Field(max_length=40, pattern=r"^[a-z0-9-]+$")]
Count = Annotated[int, Field(ge=0, le=MAX_BYTES)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Text = Annotated[str, Field(min_length=1, max_length=1000)]
FrameSize = tuple[Annotated[int, Field(ge=1, le=100_000)], Annotated[int, Field(ge=1, le=100_000)]]
PackedShape = Annotated[
    tuple[Annotated[int, Field(ge=1, le=1 << 40)], ...], Field(min_length=2, max_length=8)
]
Precision = Literal["fp32", "tf32", "bf16"]
ActivationPlace = Annotated[str, Field(max_length=40, pattern=r"^(input|[0-9]+\.[0-9]+)$")]
ActivationRange = tuple[
    Annotated[float, Field(le=0, allow_inf_nan=False)],
    Annotated[float, Field(ge=0, allow_inf_nan=False)],
]
"""The least and largest value of an activation; 0 is within."""


@dataclass(frozen=True)
class ByteCounts:
    """Bytes of the originals one by one, of the bundle's unique tensors, and the bytes that sharing could save."""

    before: Count
    after: Count
    ceiling: Count


@dataclass(frozen=True)
class StoredTensor:
    """How a tensor is packed where the architecture uses float32 (models.quantization).

    `scale` names the tensor of the scales of integer codes; `shape` is the weight's, for int4.
    """

    dtype: Bits
    scale: TensorName | None = None
    shape: PackedShape | None = None


@dataclass(frozen=True)
class TrainingRecord:
    """How a query's model was trained when it was merged: the precision of its passes."""

    precision: Precision


@dataclass(frozen=True)
class Substitution:
    """The `query` whose network answers this one, and the `model`, of so many `bytes`, in whose place it does."""

    query: Id
    model: ModelName
    bytes: Count


@dataclass(frozen=True)
class OriginRecord:
    """What a query was merged from, as SHA-256: its `definition` in the workload, and its original's file (`weights`).

    `added`: it was added to a bundle that was there, whose other queries stayed as they were.
    """

    definition: TensorName
    weights: TensorName
    added: bool = False


class BundleEvidence(TypedDict):
    """Accuracy on the test split, and what is proven; further plain keys (`from`, `needs`, map ...) may follow."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    metric: Text
    split: Text
    samples: Count
    original: float | None
    merged: float | None
    ratio: float | None
    proven: NotRequired[bool]
    lower_end: NotRequired[float | None]
    evidence: NotRequired[Literal["labels", "original", "none"]]
    reason: NotRequired[Annotated[str, Field(max_length=1000)]]


@dataclass(frozen=True)
class BundleQuery:
    """One query of a bundle: its question, its model, its tensors, its evidence.

    `tensors` maps state_dict keys of the architecture to tensor names, layer by layer; `stored` maps those keys whose
    tensors are packed. `fps` None means the camera's own. `threshold` is the score threshold chosen on val
    (detection); `trained` None means that no merge trained the model; `substitution` None that its own network answers.
    With the model "graph", `graph` names the U8 tensor that holds the network as an ONNX document without weights, and
    `decoder` says what its outputs mean; of any other model `document` names such a tensor, where the bundle has one.
    `agreement` says how outputs of the task `tensor` are compared. `activations` are the ranges of those that are
    computed in eight bits, by place in the document (models.graph.activations); empty where none are. `origin` is what
    it was merged from, None where that is not known.
    """

    id: Id
    camera: Id
    task: TaskName
    classes: Annotated[tuple[Text, ...], Field(max_length=100_000)]
    model: ModelName
    model_args: dict[str, JsonValue] = field(hash=False)
    input_size: InputSize
    preprocess: Preprocess
    fps: Fps | None
    sla_ms: SlaMs
    accuracy_target: Annotated[float, Field(gt=0, le=1)]
    tensors: dict[ParameterPath, TensorName] = field(default_factory=dict, hash=False)
    stored: dict[ParameterPath, StoredTensor] = field(default_factory=dict, hash=False)
    evidence: BundleEvidence | None = field(default=None, hash=False)
    roi: tuple[float, float, float, float] | None = None
    min_score: Fraction = 0.0
    priority: Priority = 1
    threshold: Fraction | None = None
    trained: TrainingRecord | None = None
    substitution: Substitution | None = None
    graph: TensorName | None = None
    decoder: DecoderName | None = None
    agreement: Agreement | None = None
    frame_size: FrameSize | None = None
    multi_label: bool = False
    document: TensorName | None = None
    activations: dict[ActivationPlace, ActivationRange] = field(default_factory=dict, hash=False)
    origin: OriginRecord | None = None

    @property
    def network_document(self) -> str | None:
        """The U8 tensor that holds the network as an ONNX document without weights, if the bundle has it."""
        return self.graph or self.document

    @property
    def least_score(self) -> float:
        """From which its answers count: its `min_score`, else the threshold chosen on val, or that of its task."""
        return self.min_score or self.threshold or task_of(self).unlabelled_threshold

    @property
    def region(self) -> Region:
        """The part of its camera's frames that it looks at."""
        return Region(self.roi, self.frame_size)

    @property
    def view(self) -> tuple[str, Region]:
        """Equal for queries that take the same pixels of the same frames."""
        return self.camera, self.region

    @property
    def network(self) -> tuple[str | None, ...]:
        """What makes two queries' networks the same one, but for arguments, sizes and classes."""
        return self.model, self.graph, self.decoder

    @classmethod
    def of(
        cls,
        query: Query,
        evidence: Mapping[str, Any] | None = None,
        threshold: float | None = None,
        precision: Precision | None = None,
    ) -> BundleQuery:
        """The record of a workload's query, without tensors, which `write_bundle` adds.

        `evidence` holds the keys of BundleEvidence; numbers that are not finite become null. Raises InputError for a
        query that a manifest cannot hold, so call it once before the work starts, too.
        """
        from gemel.models.zoo import preprocess_of
        from gemel.models.zoo.user_models import is_model_file

        preprocess = preprocess_of(query)
        record = cls(
            id=query.id,
            camera=query.camera,
            task=query.task,
            classes=tuple(query.classes),  # type: ignore[arg-type]
            model=GRAPH if is_model_file(query.model) else query.model,
            model_args=dict(query.model_args),
            input_size=side_or_sides(preprocess.size),
            preprocess=preprocess,
            fps=query.fps,
            sla_ms=query.sla_ms,
            accuracy_target=query.accuracy_target,
            evidence=None if evidence is None else finite(evidence),
            roi=query.roi,
            frame_size=query.frame_size,
            min_score=query.min_score,
            priority=query.priority,
            threshold=threshold,
            agreement=query.agreement,
            multi_label=query.multi_label,
            trained=TrainingRecord(precision) if precision is not None else None,
        )
        try:
            _QUERY.validate_json(
                json.dumps(dataclasses.asdict(record), allow_nan=False), strict=True
            )
            _check_query(record, "")
        except (ValueError, TypeError, ParseError) as error:
            problem = (
                _first_problem(error)
                if isinstance(error, ValidationError)
                else str(error).removeprefix(".")
            )
            raise InputError(f"query {query.id}", problem, "correct the workload") from error
        return record

    def places(self) -> dict[str, str]:
        """State_dict key -> tensor name, and `KEY.scale` -> name right after the key of a tensor with a scale."""
        places: dict[str, str] = {}
        for key, name in self.tensors.items():
            places[key] = name
            packed = self.stored.get(key)
            if packed is not None and packed.scale is not None:
                places[f"{key}.{SCALE}"] = packed.scale
        return places


@dataclass(frozen=True)
class Shared:
    """A tensor used at two or more places, of one query or of several: (query id, state_dict key)."""

    tensor: TensorName
    members: tuple[tuple[Id, ParameterPath], ...]


@dataclass(frozen=True)
class Manifest:
    """Everything a bundle says about its tensors."""

    format: Literal[3]
    workload: Id
    method: Id
    bytes: ByteCounts
    queries: Annotated[tuple[BundleQuery, ...], Field(min_length=1, max_length=MAX_QUERIES)]
    shared: tuple[Shared, ...]

    def to_json(self) -> str:
        """The text under `gemel.manifest`; empty optional keys are left out."""
        document = dataclasses.asdict(self)
        for query in document["queries"]:
            for key in (
                "stored",
                "trained",
                "substitution",
                "graph",
                "decoder",
                "agreement",
                "multi_label",
                "document",
                "activations",
                "origin",
            ):
                if not query[key]:
                    del query[key]
            for packed in query.get("stored", {}).values():
                if packed["shape"] is None:
                    del packed["shape"]
        return json.dumps(document, allow_nan=False, separators=(",", ":"))


def shared_of(queries: Iterable[BundleQuery]) -> tuple[Shared, ...]:
    """The tensors used at two or more places, in order of first use."""
    members: dict[str, list[tuple[str, str]]] = {}
    for query in queries:
        for path, name in query.places().items():
            members.setdefault(name, []).append((query.id, path))
    return tuple(Shared(name, tuple(places)) for name, places in members.items() if len(places) > 1)


def parse_manifest(text: str) -> Manifest:
    """Read an untrusted manifest; raises ParseError naming the key whose type, range or format does not fit."""
    try:
        document = parse_json(text.encode())
    except ParseError as error:
        raise ParseError(f"the manifest is not JSON: {error}") from None
    version = document.get("format") if isinstance(document, dict) else FORMAT
    if type(version) is not int or version != FORMAT:
        raise ParseError(
            f"unknown format {str(version)[:20]!r}; this version reads format {FORMAT}"
        )
    try:
        manifest = _MANIFEST.validate_json(text, strict=True)
    except ValidationError as error:
        raise ParseError(_first_problem(error)) from None
    ids: set[str] = set()
    for index, query in enumerate(manifest.queries):
        _check_query(query, f"queries[{index}] ({query.id})")
        if (query.graph is None) == (query.model == GRAPH):
            raise ParseError(
                f"queries[{index}].graph: model '{GRAPH}' has one, and no other model has"
            )
        if query.graph is not None and query.document is not None:
            raise ParseError(f"queries[{index}].document: model '{GRAPH}' has its own, the graph")
        if not query.tensors:
            raise ParseError(f"queries[{index}].tensors: none")
        if query.id in ids:
            raise ParseError(f"queries[{index}].id: '{query.id}' occurs twice")
        ids.add(query.id)
    return manifest


def _check_query(query: BundleQuery, where: str) -> None:
    """Check what a type alone cannot."""
    if query.preprocess.size != height_width(query.input_size):
        raise ParseError(f"{where}.preprocess: its size is not the query's input_size")
    if len(set(query.classes)) < len(query.classes):
        raise ParseError(f"{where}.classes: a class occurs twice")
    if query.roi is not None and not all(
        0 <= low < high < FURTHEST_PIXEL for low, high in zip(query.roi[:2], query.roi[2:])
    ):
        raise ParseError(f"{where}.roi: empty or negative, or beyond {FURTHEST_PIXEL:,.0f} pixels")


def _first_problem(error: ValidationError) -> str:
    """`queries[2].sla_ms: what is wrong`, the first of several."""
    first = error.errors(include_url=False)[0]
    key = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in first["loc"])
    return f"{key.removeprefix('.')[:200] or 'the manifest'}: {first['msg']}"


_MANIFEST = TypeAdapter(Manifest)
_QUERY = TypeAdapter(BundleQuery)


def graph_names(queries: Iterable[BundleQuery]) -> tuple[str, ...]:
    """The tensors that hold networks, in order of first use; they are code, and no weights are counted in them."""
    documents = (query.network_document for query in queries)
    return tuple(dict.fromkeys(name for name in documents if name is not None))


def has_documents(queries: Iterable[BundleQuery]) -> bool:
    """Whether any of these queries has a document that was made when the bundle was written."""
    return any(query.document is not None for query in queries)


def count_bytes(
    queries: Iterable[BundleQuery], entries: Mapping[str, Entry], ceiling_bytes: int
) -> ByteCounts:
    """before = the sum over queries of `original_bytes`; after = all unique tensors, scales included."""
    before = 0
    unique: set[str] = set()
    for query in queries:
        before += original_bytes(query, entries)
        unique.update(query.places().values())
    return ByteCounts(before, sum(entries[name].nbytes for name in unique), ceiling_bytes)


def original_bytes(query: BundleQuery, entries: Mapping[str, Entry]) -> int:
    """Bytes of a query's original: a float32 tensor of its own at every place of its own architecture."""
    if query.substitution is not None:
        return query.substitution.bytes
    return sum(wide_bytes(query, key, entries[name]) for key, name in query.tensors.items())


def wide_bytes(query: BundleQuery, key: str, entry: Entry) -> int:
    """Bytes of the tensor at a state_dict key as it is used, however it is stored."""
    return math.prod(wide_shape(query, key, entry)) * ITEM_BYTES[wide_code(query, key, entry)]


def wide_code(query: BundleQuery, key: str, entry: Entry) -> str:
    """The dtype code in which the tensor at a state_dict key is used, however it is stored."""
    return WIDE_CODE if key in query.stored else entry.dtype


def wide_shape(query: BundleQuery, key: str, entry: Entry) -> tuple[int, ...]:
    """The shape in which the tensor at a state_dict key is used, however it is stored."""
    packed = query.stored.get(key)
    return entry.shape if packed is None or packed.shape is None else packed.shape
