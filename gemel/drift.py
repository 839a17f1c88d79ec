"""`gemel drift check`: a box's predictions beside its originals', on the frames that it sampled.

As in GEMEL (Padmanabhan et al., NSDI 2023) the box samples frames, and a query whose accuracy has fallen gets its own
original weights back.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gemel.drift_state import DriftState
from gemel.edge_runtime.frames.results import BUNDLE_DIGITS
from gemel.edge_runtime.frames.samples import (
    DRIFT_FILE,
    SUFFIX,
    DriftReport,
    QueryDrift,
    compare_samples,
    read_head,
    write_drift,
)
from gemel.edge_runtime.life.config import SAMPLES
from gemel.models.bundle import BundleQuery, check_output
from gemel.models.errors import InputError
from gemel.models.files.extras import is_installed, require_merge
from gemel.models.files.io import check_apart
from gemel.models.files.pictures import SAMPLE_NAME
from gemel.models.measures.agreement import (
    BELOW,
    KEPT,
    ONE_ANSWER,
    TOO_FEW,
    UNSURE,
    Agreement,
    ComparedFrames,
    compare_agreement,
    values_of,
)
from gemel.models.notes import add_note
from gemel.models.stages import Progress, Stages, silent
from gemel.models.tasks import task_of
from gemel.originals import BUNDLE_HINT, Original, Originals
from gemel.text import key_text, number, table

if TYPE_CHECKING:
    from gemel.models.workload import Query, Workload

MAX_SAMPLES = 100_000
DEFAULT_RATE = 1 / 60
"""Samples of a query a second, where a spool holds too few to tell."""
MAX_SHOWN_CHANCE = 1000
"""What comes more often a year by chance is no evidence."""
READING, COMPARING, WRITING = "reading samples", "running the originals", "writing the bundle"
UNREADABLE, OTHER_BUNDLE, UNKNOWN, UNUSABLE = (
    "unreadable", "of another bundle", "of no query of the workload", "unusable"
)  # fmt: skip
"""Why a sample is left out."""
LEFT_OUT_HINT = "a check covers one bundle (--bundle) and the queries of one workload"
OWN_WEIGHTS = "already has its own weights: merging is not the cause"
SPOOL_HINT = "name the `spool` of a box, with its folder `samples`"
VERDICT_TEXTS = {
    KEPT: "on target", BELOW: "BELOW its target", UNSURE: "below its target, perhaps by chance",
    TOO_FEW: "too few frames with something to compare",
    ONE_ANSWER: "no evidence: every frame has the same answer",
}  # fmt: skip


@dataclass(frozen=True)
class DriftSamples:
    """The samples of one bundle (first digits of its SHA-256) by query, oldest first, and those left out by reason."""

    bundle: str
    by_query: Mapping[str, tuple[Path, ...]]
    left_out: Counter[str]


@dataclass(frozen=True)
class DriftCheck:
    """The result of a check; `metrics` and `notes` are by query, `reported`: the spool holds the report for the box."""

    spool: Path
    workload: str
    report: DriftReport
    metrics: Mapping[str, str]
    notes: Mapping[str, str]
    left_out: Mapping[str, int]
    out: Path | None
    reported: bool

    @property
    def met(self) -> bool:
        """Whether no query is below its target."""
        return all(row.ratio is None or row.ratio >= row.target for row in self.report.queries)

    def to_json(self) -> dict[str, Any]:
        """The keys of `gemel drift check --json`."""
        queries = [
            {**row.model_dump(), "metric": self.metrics[row.id], "note": self.notes.get(row.id)}
            for row in self.report.queries
        ]
        return {
            "spool": str(self.spool), "workload": self.workload, "bundle": self.report.bundle,
            "checked_at": self.report.checked_at, "queries": queries, "left_out": dict(sorted(self.left_out.items())),
            "out": None if self.out is None else str(self.out), "reported": self.reported,
        }  # fmt: skip

    def to_text(self) -> str:
        """A row for each query, the samples left out, and the next step."""
        rows = []
        for row in self.report.queries:
            note = "reverted to its own weights" if row.reverted else self.notes.get(row.id)
            verdict = VERDICT_TEXTS[row.verdict] + (f"; {note}" if note else "")
            metric, chance = key_text(self.metrics[row.id]), _format_chance(row.chance_per_year)
            rows.append((row.id, metric, row.frames, number(row.ratio), number(row.target), verdict, chance))
        lines = [
            table(("query", "metric", "frames", "ratio", "target", "verdict", "by chance"), rows),
            "",
            f"samples of bundle {self.report.bundle}",
        ]
        if self.out is not None:
            lines.append(f"{self.out}: written; ship it with `gemel bundle diff OLD {self.out} -o update`")
        elif any(row.verdict == BELOW and row.id not in self.notes for row in self.report.queries):
            lines.append("-o FILE writes a bundle in which the queries below their target have their own weights again")
        if not self.reported:
            lines.append(f"{self.spool} cannot be written: the box does not get the result")
        return "\n".join(lines)

    __repr__ = to_text


def _format_chance(chance_per_year: float | None) -> str:
    """How often evidence like this comes by chance at most."""
    if chance_per_year is None:
        return "-"
    return "often" if chance_per_year > MAX_SHOWN_CHANCE else f"at most {chance_per_year:.2g} a year"


def check_drift(
    spool: str | Path,
    workload: str | Path | Workload,
    out: str | Path | None = None,
    bundle: str | Path | None = None,
    progress: Progress = silent,
) -> DriftCheck:
    """Compare a box's predictions with its originals' on the samples in its spool.

    With `out` a bundle is written in which each query that has fallen below its target has its own weights again; of
    all checks of a box in a year at most one is wrong about that (models.measures.sequential). The bundle is made from
    the one that the box ran: `bundle`, or the one that the ledger in the spool names. The report is also left in the
    spool for the box. Raises InputError, with nothing written, where the spool has no samples, weights are missing, or
    the samples are of another bundle.
    """
    spool = Path(spool)
    originals = _open_originals(spool, workload, out, bundle)
    opened, queries = originals.bundle, [row.query for row in originals.rows]
    inputs = [("the bundle", None if opened is None else opened.path), *originals.inputs]
    check_apart([("--out", out), ("the spool", spool / DRIFT_FILE)], inputs)
    if out is not None:
        check_output(out)
    stages = Stages(progress)
    stages.announce([READING, COMPARING, *([] if out is None else [WRITING])])
    stages.begin(READING)
    digest = None if opened is None else opened.digest[:BUNDLE_DIGITS]
    samples = gather_samples(spool, queries, None if bundle is None else digest)
    if digest not in (None, samples.bundle) and opened is not None:
        problem = f"has the SHA-256 {digest}..., the newest samples are of {samples.bundle}..."
        raise InputError(opened.path, problem, f"{BUNDLE_HINT}: the one that the box ran then")
    state = DriftState.read(spool, samples.bundle, len(queries))
    agreements, left_out = _compare(originals.rows, samples, state, stages)
    for reason, count in sorted(left_out.items()):
        add_note(spool, f"{count} samples {reason} are left out", LEFT_OUT_HINT)
    below = [query.id for query in queries if agreements[query.id][0].verdict == BELOW]
    reverted, notes = frozenset[str](), dict[str, str]()
    if opened is not None and out is not None and below:
        from gemel.drift_originals import write_reverted

        stages.begin(WRITING)
        reverted = write_reverted(Path(out), [query for query in queries if query.id in below], opened)  # type: ignore[misc]
        notes = {query: OWN_WEIGHTS for query in below if query not in reverted}
    rows = [
        QueryDrift(
            id=query.id, frames=one.frames, ratio=one.ratio,
            target=query.accuracy_target, verdict=one.verdict, reverted=query.id in reverted,  # type: ignore[arg-type]
            chance_per_year=chance,
        )
        for query in queries for one, chance in [agreements[query.id]]
    ]  # fmt: skip
    report = DriftReport(checked_at=round(time.time(), 3), bundle=samples.bundle, queries=rows)
    try:
        write_drift(spool, report)
        state.write()
        reported = True
    except InputError:
        reported = False
    metrics = {query.id: task_of(query).metric for query in queries}
    written = Path(out) if out is not None and reverted else None
    return DriftCheck(spool, originals.workload, report, metrics, notes, left_out, written, reported)


def _open_originals(
    spool: Path, workload: str | Path | Workload, out: str | Path | None, bundle: str | Path | None
) -> Originals:
    """The originals in PyTorch, or where only a box's libraries are installed those that are ONNX files."""
    if is_installed("torchvision"):
        from gemel.drift_originals import open_originals

        return open_originals(spool, workload, bundle, opens_bundle=out is not None or bundle is not None)
    from gemel.drift_files import open_originals

    if out is not None or not isinstance(workload, str | Path):
        require_merge("drift check -o")
    return open_originals(spool, Path(str(workload)), bundle)


def gather_samples(spool: Path, queries: Iterable[Query | BundleQuery], bundle: str | None) -> DriftSamples:
    """The samples of this bundle, or of the bundle of the newest sample; InputError where there are none."""
    left_out, heads = Counter[str](), []
    for path in _list_samples(spool):
        try:
            heads.append((read_head(path), path))
        except InputError:
            left_out[UNREADABLE] += 1
    if not heads:
        problem = f"none of its {left_out.total()} samples can be read" if left_out else "holds no samples"
        raise InputError(spool, problem, SPOOL_HINT)
    heads.sort(key=lambda one: (one[0].captured_at, one[1].name))
    chosen = bundle or heads[-1][0].bundle
    by_query: dict[str, list[Path]] = {query.id: [] for query in queries}
    for head, path in heads:
        if head.bundle != chosen:
            left_out[OTHER_BUNDLE] += 1
        elif head.query not in by_query:
            left_out[UNKNOWN] += 1
        else:
            by_query[head.query].append(path)
    return DriftSamples(chosen, {query: tuple(paths) for query, paths in by_query.items()}, left_out)


def _list_samples(spool: Path) -> list[Path]:
    folder, paths = spool / SAMPLES, []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.endswith(SUFFIX) and not entry.name.startswith("."):
                    paths.append(folder / entry.name)
                if len(paths) > MAX_SAMPLES:
                    raise InputError(folder, f"holds more than {MAX_SAMPLES:,} samples", "remove the oldest")
    except OSError as error:
        raise InputError(folder, f"cannot be read: {error.strerror}", SPOOL_HINT) from error
    return paths


def _compare(
    originals: Sequence[Original], samples: DriftSamples, state: DriftState, stages: Stages
) -> tuple[dict[str, tuple[Agreement, float | None]], Counter[str]]:
    """The agreement of each query with its original and the detector's `chance_per_year`, and how many samples were
    left out, by reason.

    A query is below its target once its detector says so, which saw each sample once (gemel.drift_state).
    """
    agreements, left_out = dict[str, tuple[Agreement, float | None]](), samples.left_out.copy()
    stages.begin(COMPARING, sum(map(len, samples.by_query.values())))
    rate = sample_rate(samples)
    for query, shipped, load in originals:
        predict, task = load(), task_of(query)
        paths, until = samples.by_query[query.id], state.seen_until(query.id)
        seen = [path for path in paths if path.name <= until]
        fresh = [path for path in paths if path.name > until]
        parts = [compare_samples(shipped, part, predict, stages.add) for part in (seen, fresh)]
        left_out[UNUSABLE] += sum(part.unusable for part in parts)
        known = [part for part in parts if len(part.counts)]
        counts = np.concatenate([part.counts for part in known]) if known else parts[0].counts
        expected = known[-1].expected if known else 1.0
        compared = ComparedFrames(counts, expected)
        values, last = values_of(parts[1], task), max((path.name for path in paths), default=until)
        fall = state.add(query.id, query.accuracy_target * expected, values, last, rate)
        agreement = compare_agreement(compared, task, query.accuracy_target, fall.is_below)
        agreements[query.id] = agreement, fall.chance_per_year
    return agreements, +left_out


def sample_rate(samples: DriftSamples) -> float:
    """Samples of a query a second: the most of all queries."""
    rates = [DEFAULT_RATE]
    for paths in samples.by_query.values():
        names = [SAMPLE_NAME.fullmatch(path.name) for path in paths]
        times_s = sorted(int(name[1]) / 1000 for name in names if name)
        if len(times_s) > 1 and times_s[-1] > times_s[0]:
            rates.append((len(times_s) - 1) / (times_s[-1] - times_s[0]))
    return max(rates)
