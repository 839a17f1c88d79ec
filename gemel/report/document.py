"""The report of an evaluation as values: what `gemel eval` measures, and report.json read back as untrusted input."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from gemel.models.bits import FP32
from gemel.models.errors import InputError, one_line, size_text
from gemel.models.files.io import MAX_QUERIES, Exact, read_json, validate
from gemel.models.tasks import TaskName
from gemel.text import flips_text, state_text

REPORT_JSON = "report.json"
REPORT_FORMAT = 6
HINT = "evaluate again: gemel eval BUNDLE WORKLOAD -o DIR"
MAX_SETTINGS, MAX_SEEDS, MAX_COMMANDS = 100, 1000, 100
ORIGINALS, MERGED = "originals", "merged"
"""The arms of a stream."""
MIN_STRONG = 0.6
"""Of accuracy or F1 on test: an original below answers too often wrong to be worth keeping; no mean counts it."""
MODELS = ("original", "merged")
"""The models that predict an example frame."""

Fraction = Annotated[float, Field(ge=0, le=1)]
Ratio = Annotated[float, Field(ge=0, le=1e6)]
Number = Annotated[float, Field(ge=-1e15, le=1e15)]
Count = Annotated[int, Field(ge=0, le=2**60)]
Text = Annotated[str, Field(max_length=4096), AfterValidator(one_line)]
Arm = Literal["originals", "merged"]
Pair = Annotated[list[Number], Field(min_length=2, max_length=2)]
Box = Annotated[list[Number], Field(min_length=4, max_length=4)]
Polygon = list[Annotated[list[Number], Field(min_length=2, max_length=2)]]


NOTHING_SHOWN = " holds no "
"""In the reason of a query whose footage shows nothing."""


class Row(Exact, extra="ignore", populate_by_name=True):
    """A frozen value with bounded numbers and texts of one line; unknown keys are left."""


class ErrorCount(Row):
    """How often one kind of error was made, and by how much F1 would rise were these alone corrected."""

    count: Count
    cost: Number


class ClassRecall(Row):
    """The recall of both models on the frames of one class; of segmentation, the IoU of its pixels."""

    name: Text = Field(alias="class")
    frames: Count
    original: Fraction
    merged: Fraction


class ReportedFlips(Row):
    """Right answers of the original on labelled frames, those that are wrong now, and the upper end of their part."""

    right: Count
    wrong: Count
    upper_end: Fraction
    frames: list[Text]

    @property
    def text(self) -> str:
        """As people read it."""
        return flips_text(self.right, self.wrong, self.upper_end, self.frames)


class OfflineProof(Row):
    """What is proven of a query (`models.measures.evaluation.Evidence`)."""

    proven: bool = False
    state: Literal["proven", "unchanged", "not proven"] = "not proven"
    lower_end: Ratio | None = None
    source: Text | None = Field(alias="from", default=None)
    needs: Text = ""
    answers_kept: Fraction | None = None
    answers_kept_end: Fraction | None = None


class OfflineRow(OfflineProof):
    """One query on its test split (`models.measures.evaluation.Evidence`), with what its task adds."""

    query: Text
    camera: Text
    task: TaskName
    model: Text
    metric: Text
    split: Text
    samples: Count
    units: Count
    original: Fraction
    merged: Fraction
    ratio: Ratio
    chance_corrected: Number
    met: bool
    worth: bool
    agreement: Fraction
    flips: ReportedFlips | None = None
    evidence: Literal["labels", "original", "none"] = "labels"
    reason: Text = ""
    target: Ratio
    sla_ms: Number
    threshold: Number
    label_interval_s: Number
    errors: dict[Literal["original", "merged"], dict[Text, ErrorCount]] | None = None
    map_original: Fraction | None = None
    map_merged: Fraction | None = None
    map50_original: Fraction | None = None
    map50_merged: Fraction | None = None
    classes: list[ClassRecall] | None = None
    network: Text | None = None

    @property
    def lost(self) -> bool:
        """Whether merging costs the query its target."""
        return self.has_evidence and not self.met

    @property
    def has_evidence(self) -> bool:
        """Whether the footage and the original allow a conclusion."""
        return self.worth and self.evidence != "none"

    @property
    def shows_nothing(self) -> bool:
        """Whether there was nothing to compare, so that scores mean nothing."""
        return NOTHING_SHOWN in self.reason

    @property
    def is_sure(self) -> bool:
        """Whether the query is proven, or cannot miss."""
        return self.state != "not proven"

    @property
    def status(self) -> str:
        """What is proven, in words."""
        return state_text(self.state, self.lower_end, self.source, self.needs)

    @property
    def doubt(self) -> str:
        """Why there is no evidence."""
        return self.reason or "the original is too weak"


class _Setting(Row):
    arm: Arm
    memory: Text
    memory_bytes: Count


class StreamRow(_Setting):
    """A query's accuracy on the stream and the age of its results; `spread` is the lowest and the highest seed."""

    query: Text
    metric: Text
    accuracy: Fraction
    age_p50_ms: Number | None
    age_p95_ms: Number | None
    age_p99_ms: Number | None
    spread: Pair
    by_seed: Annotated[list[Fraction], Field(min_length=1, max_length=MAX_SEEDS)]
    answered: Fraction

    @property
    def ages(self) -> tuple[float | None, ...]:
        """Percentiles 50, 95 and 99 in milliseconds; None without results."""
        return (self.age_p50_ms, self.age_p95_ms, self.age_p99_ms)


class LedgerRow(_Setting):
    """The frames of a query, summed over seeds."""

    query: Text
    received: Count
    processed: Count
    late: Count
    failed: Count
    pending: Count
    dropped: dict[Text, Count]


class TransferRow(_Setting):
    """Frames and loads of all queries, summed over seeds."""

    received: Count
    processed: Count
    bytes_moved: Count
    swaps: Count


class CostRow(Row):
    """What a query costs on the virtual clock; a load is that of all its weights."""

    arm: Arm
    query: Text
    weights_bytes: Count
    load_ms: Number
    run_ms: Number
    workspace_bytes: Count


class QueryBytes(Row):
    """A query's bytes: its original's, its part of what it shares, its own; its bits, and why there are no fewer."""

    query: Text
    model: Text
    bits: Text = FP32
    why_bits: Text = ""
    before: Count
    shared_part: Number
    private: Count


class WeightBytes(Row):
    """Bytes of all weights, as stored and as resident; `ceiling` is what sharing every possible layer would save."""

    before: Annotated[int, Field(ge=1, le=2**60)]
    after: Count
    ceiling: Count
    saved_fraction: Annotated[float, Field(ge=-1e6, le=1)]
    ceiling_fraction: Fraction
    stored: dict[Text, Count]
    queries: list[QueryBytes]
    resident_before: Count
    resident_after: Count


class SharedWeight(Row):
    """A weight that several layers use, each given by its query and path."""

    tensor: Text
    bytes: Count
    shape: list[Count]
    members: list[Annotated[list[Text], Field(min_length=2, max_length=2)]]


class TrueBox(Row):
    """A labelled object, and the models that found it."""

    name: Text = Field(alias="class")
    box: Box
    found: list[Text]
    polygons: list[Polygon] = Field(default_factory=list)


class PredictedBox(Row):
    """A predicted object; `right` if it matches a labelled one. `polygons` are those of its mask or rotated box."""

    name: Text = Field(alias="class")
    score: Number
    box: Box
    right: bool
    polygons: list[Polygon] = Field(default_factory=list)


class PredictedClass(Row):
    """A predicted class."""

    name: Text = Field(alias="class")
    score: Number
    right: bool


class _Example(Row):
    """A test frame that merging cost `lost` of its score; boxes are in pixels of the frame."""

    query: Text
    unit: Text
    time_s: Number
    lost: Number
    width: Annotated[int, Field(ge=1, le=2**20)]
    height: Annotated[int, Field(ge=1, le=2**20)]


class DetectionExample(_Example):
    """A frame with the labelled objects and those of both models."""

    task: Literal["detection"] = "detection"
    truth: list[TrueBox]
    original: list[PredictedBox]
    merged: list[PredictedBox]


class ClassificationExample(_Example):
    """A frame with its class and those of both models."""

    task: Literal["classification"] = "classification"
    truth: Text
    original: PredictedClass
    merged: PredictedClass


class PictureExample(_Example):
    """A frame whose photo shows, side by side, the labels (where they can be drawn) and what both models predicted."""

    task: Literal["segmentation", "keypoints", "embedding", "tensor"]
    panels: Annotated[int, Field(ge=1, le=3)]


Example = DetectionExample | ClassificationExample | PictureExample


class GatingRow(Row):
    """Motion gating of a query's test frames at its rate: how many run, and the merged model's accuracy over all of
    them with every frame run (`ungated`) and with gating."""

    query: Text
    metric: Text
    frames: Count
    run: Count
    still_fraction: Fraction
    ungated: Fraction
    gated: Fraction


class ReportedBundle(Row):
    """The bundle's file name and SHA-256."""

    file: Text
    digest: Text


class ReportDevice(Row):
    """The device that times are of; all its memory in bytes, 0 where it is not known."""

    name: Text
    title: Text
    modelled: bool
    sources: list[Text]
    clock: Text
    memory_bytes: Count = 0


class Settings(Row):
    """How streams were scheduled."""

    policy: Text


class MemorySetting(Row):
    """A memory budget that was simulated for both arms."""

    memory: Text
    memory_bytes: Count


class Report(Row):
    """Everything that `gemel eval` measured, with the commands that reproduce it.

    `flops_before` and `flops_after` are FLOPs a second of all queries at their frame rates (1 a second where unknown),
    `flops_with_prefix` those with what queries of one camera have in common run once a frame. `base_bytes` is what the
    process of a box takes besides weights and workspace, as `gemel plan` counts it.
    """

    format: Literal[6] = REPORT_FORMAT
    workload: Text
    method: Text
    bundle: ReportedBundle
    created_at: Text
    device: ReportDevice
    seeds: Annotated[list[Count], Field(max_length=MAX_SEEDS)]
    settings: Settings
    versions: dict[Text, Text]
    costs: list[CostRow]
    base_bytes: Count
    bytes: WeightBytes
    shared: list[SharedWeight]
    offline: Annotated[list[OfflineRow], Field(min_length=1, max_length=MAX_QUERIES)]
    streaming: list[StreamRow]
    ledger: list[LedgerRow]
    transfers: list[TransferRow]
    examples: list[Example]
    limits: list[Text]
    headline: MemorySetting
    gating: list[GatingRow] = Field(default=[])
    flops_before: Number = 0.0
    flops_after: Number = 0.0
    flops_with_prefix: Number = 0.0
    commands: Annotated[list[Text], Field(max_length=MAX_COMMANDS)]

    def __repr__(self) -> str:
        met, sure = sum(row.met for row in self.offline), sum(row.is_sure for row in self.offline)
        sizes = f"{size_text(self.bytes.before)} became {size_text(self.bytes.after)}"
        targets = f"{met} of {len(self.offline)} queries meet their target, {sure} proven or unchanged"
        return f"<report of {self.workload}: {sizes}; {targets}; report.html has all>"

    def to_json(self) -> dict[str, Any]:
        """The document of report.json."""
        return self.model_dump(mode="json", by_alias=True)

    @cached_property
    def queries(self) -> list[str]:
        """The ids of the queries."""
        return [row.query for row in self.offline]

    @cached_property
    def resident_rows(self) -> list[tuple[str, int, int]]:
        """Arm, bytes of its largest run and of all its weights."""
        runs = {row.arm: [one.workspace_bytes for one in self.costs if one.arm == row.arm] for row in self.costs}
        weights = {MERGED: self.bytes.resident_after, ORIGINALS: self.bytes.resident_before}
        return [(arm, max(nbytes), weights[arm]) for arm, nbytes in runs.items()]

    @cached_property
    def memory_settings(self) -> list[MemorySetting]:
        """The simulated memory settings, from small to large."""
        settings = {row.memory: row.memory_bytes for row in self.streaming}
        ordered = sorted(settings.items(), key=lambda one: one[1])
        return [MemorySetting(memory=name, memory_bytes=nbytes) for name, nbytes in ordered]

    @cached_property
    def judged_memory(self) -> MemorySetting | None:
        """The memory setting that the conclusion is for; None without streams."""
        settings = self.memory_settings
        return next((one for one in settings if one.memory == self.headline.memory), settings[0] if settings else None)

    @cached_property
    def divisors(self) -> dict[str, float] | None:
        """What each query's accuracy is divided by before means over queries; None where all have one metric."""
        if len({row.metric for row in self.offline}) == 1:
            return None
        return {row.query: row.original or 1.0 for row in self.offline}

    @cached_property
    def strong(self) -> list[str]:
        """The queries whose originals are strong enough for their accuracy to be worth keeping."""
        return [row.query for row in self.offline if row.has_evidence and row.original >= MIN_STRONG]

    @cached_property
    def averaged(self) -> list[str]:
        """The queries that means are over: those with strong originals, or all where none is strong."""
        return self.strong or self.queries

    def stream_accuracies(self, memory: str) -> dict[str, tuple[float, float]]:
        """Query -> streaming accuracy (originals, merged) at a memory setting."""
        rows = {(row.query, row.arm): row.accuracy for row in self.streaming if row.memory == memory}
        return {query: (rows[query, ORIGINALS], rows[query, MERGED]) for query in dict.fromkeys(one for one, _ in rows)}


def report_path(given: str | Path) -> Path:
    """The report.json that is meant: the file itself, or that in a folder of `gemel eval`."""
    path = Path(given)
    return path / REPORT_JSON if path.is_dir() else path


def read_report(path: Path) -> Report:
    """The report that `gemel eval` wrote; InputError for anything else and for contradictory rows."""
    document = read_json(path, HINT)
    if document.get("format") != REPORT_FORMAT:
        raise InputError(path, "is no report of this version's gemel eval", HINT, "format")
    report = validate(path, document, Report, hint=HINT)
    if len(set(report.queries)) < len(report.queries):
        raise InputError(path, "a query occurs twice", HINT, "offline")
    if problem := _stream_problem(report):
        raise InputError(path, problem, HINT, "streaming")
    return report


def _stream_problem(report: Report) -> str:
    """What contradicts both arms of every query at every memory setting, each once, for the same bytes and seeds."""
    wanted = sorted((arm, query) for arm in (MERGED, ORIGINALS) for query in report.queries)
    if len(report.memory_settings) > MAX_SETTINGS:
        return f"more than {MAX_SETTINGS} memory settings"
    seeds = {len(row.by_seed) for row in report.streaming}
    for setting in report.memory_settings:
        rows = [row for row in report.streaming if row.memory == setting.memory]
        if sorted((row.arm, row.query) for row in rows) != wanted or len(seeds) > 1:
            return f"the rows of memory {setting.memory} are not of both arms and all queries, once each"
        if len({row.memory_bytes for row in rows}) > 1:
            return f"memory {setting.memory} is not the same bytes in all rows"
    return ""
