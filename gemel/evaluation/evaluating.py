"""What a bundle is worth: offline and streaming accuracy against the originals, bytes, and where frames went."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from edge_runtime.rehearsal.profiles import DeviceProfile, costs_for
from edge_runtime.schedule.costs import Costs
from edge_runtime.schedule.settings import memory_bytes, memory_settings
from gemel.evaluation.arms import MERGED, ORIGINALS, Streamed, Tested, stream_arms
from gemel.evaluation.belonging import belonging
from gemel.evaluation.caveats import caveats
from gemel.evaluation.streaming import Footage, frame_interval_s
from gemel.looking.footprint import bytes_of, resident_bytes, shared_of
from gemel.planning.conditions import DEFAULT_DEVICE
from gemel.planning.on_paper import costs_apart, profile_named
from gemel.report.frames import examples
from gemel.report.page import render
from gemel.text import size
from merger.journal.progress import Progress, Stages, silent
from models.bundle import Bundle
from models.errors import InputError
from models.files.apart import check_apart
from models.files.atomic import writing
from models.files.json_file import finite
from models.files.lock import locked
from models.frames.data import load_split
from models.frames.prepared import Prepared
from models.measuring.evaluation import Evidence, compare, predict, truths_of
from models.sharing.layers import state_bytes
from models.tasks import task_of
from models.tasks.average_precision import mean_average_precision
from models.weights.reading import load_weights
from models.workload import Query, inputs_of, load_workload
from models.zoo import build_query

LEAST = "min"
MEMORY = (LEAST, "50%", "75%")
JUDGING, STREAMING, WRITING = "judging each query on test", "playing the streams", "writing the report"
REPORT_JSON, REPORT_HTML = "report.json", "report.html"


@dataclass(frozen=True)
class _Judged:
    """One query looked at offline."""

    tested: Tested
    evidence: Evidence
    extra: dict[str, float]
    labelled: bool
    original_bytes: int
    pictures: list[dict[str, Any]]


def evaluate(
    bundle: str | Path,
    workload: str | Path,
    out_dir: str | Path,
    profile: str = DEFAULT_DEVICE,
    seeds: int = 3,
    progress: Progress = silent,
    memory: str = LEAST,
) -> dict[str, Any]:
    """Judge a bundle against the originals of its workload; write `report.json` and `report.html` into `out_dir`.

    `memory` is what the box is to have, a setting or a size: what the report says first holds for it. Returns the
    document that report.json holds: DESIGN's keys `offline`, `streaming`, `ledger` and what the page needs beside
    them. Raises InputError, with nothing written, when bundle and workload do not belong together, weights or test
    data are missing, or the largest query does not fit the memory.
    """
    out_dir = Path(out_dir)
    device = profile_named(profile)
    load = load_workload(workload)
    opened = belonging(bundle, load)
    written = [("--out", out_dir / name) for name in (REPORT_JSON, REPORT_HTML)]
    check_apart(written, [("the bundle", opened.path), *inputs_of(load)])
    _writable(out_dir)
    apart = costs_apart(device, load.queries)
    budgets = _budgets(memory, apart)
    with locked(out_dir / REPORT_JSON):
        stages = Stages(progress)
        stages.announce([JUDGING, STREAMING, WRITING])
        stages.begin(JUDGING, len(load.queries))
        judged = []
        for query in load.queries:
            progress("evaluate", query=query.id)
            judged.append(_judge(query, opened))
            progress("test", query=query.id, ratio=judged[-1].evidence.ratio, target=query.accuracy_target)
            stages.add()
        stages.begin(STREAMING)
        arms = {ORIGINALS: apart, MERGED: costs_for(device, opened)}
        streamed = stream_arms([one.tested for one in judged], arms, budgets, range(seeds), progress)
        stages.begin(WRITING)
        asked = {"memory": memory, "memory_bytes": budgets[memory]}
        document = finite({**_document(opened, judged, streamed, device, list(range(seeds))), "asked": asked})
        pictures = [picture for one in judged for picture in one.pictures]
        page = render(document, pictures)
        _write(out_dir, json.dumps(document, indent=1, allow_nan=False), page)
        return document


def _write(out_dir: Path, document: str, page: str) -> None:
    """Both files, or neither where there is no room; a name that is no UTF-8 stands there by its escape."""
    with (
        writing(out_dir / REPORT_JSON, overwrite=True) as first,
        writing(out_dir / REPORT_HTML, overwrite=True) as second,
    ):
        for file, text in ((first, document), (second, page)):
            file.write(text.encode("utf-8", "backslashreplace"))
            file.flush()


def _budgets(memory: str, apart: Costs) -> dict[str, int]:
    """The memory settings that are compared, and the one asked for among them, in bytes from small to large."""
    settings = memory_settings(apart)
    budgets = {name: settings[name] for name in MEMORY} | {memory: memory_bytes(memory, apart, "--memory")}
    if budgets[memory] < settings[LEAST]:
        least = f"the largest query alone does not fit; give at least {size(settings[LEAST])}"
        raise InputError("--memory", f"{memory} is too little", least)
    return dict(sorted(budgets.items(), key=lambda item: item[1]))


def _writable(out_dir: Path) -> None:
    """Refuse an output folder that cannot be made, before the long part begins."""
    if os.path.lexists(out_dir) and not out_dir.is_dir():  # links in a circle too, which lead to no path
        raise InputError(out_dir, "exists and is no folder", "give a folder", "--out")
    nearest = next(one for one in (out_dir, *out_dir.resolve().parents) if os.path.lexists(one))
    if not nearest.is_dir():
        raise InputError(nearest, "exists and is no folder", "give a folder", "--out")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise InputError(out_dir, f"{nearest} cannot be written", "choose another folder", "--out")


def _judge(query: Query, bundle: Bundle) -> _Judged:
    """Both models of a query over its test split."""
    task, device = task_of(query.task), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    original = build_query(query)
    load_weights(query, original)
    original_bytes = state_bytes(original)
    split = load_split(query, "test")
    prepared = Prepared(query, split).load()
    before = predict(original.to(device), query, prepared)
    after = predict(bundle.build(query.id, device), query, prepared)
    threshold = bundle.query(query.id).threshold
    if threshold is None:
        val = load_split(query, "val")
        chosen = val.truths is not None
        threshold = task.choose_threshold(predict(original, query, val), val.truths) if chosen else query.min_score  # type: ignore[arg-type]
    truths = truths_of(query, split, before, threshold)
    extra = {}
    if query.task == "detection":
        for name, side in (("original", before), ("merged", after)):
            found = mean_average_precision(side, truths, query.classes)  # type: ignore[arg-type]
            extra |= {f"{key}_{name}": value for key, value in found.items()}
    footage = Footage(split.units, split.times_s, query.fps)
    return _Judged(
        Tested(query, footage, truths, threshold, {ORIGINALS: before, MERGED: after}),
        compare(query, split, before, after, threshold),
        extra,
        split.truths is not None,
        original_bytes,
        examples(query, split, truths, before, after, threshold),
    )


def _document(
    bundle: Bundle, judged: Sequence[_Judged], streamed: Streamed, profile: DeviceProfile, seeds: list[int]
) -> dict[str, Any]:
    """The contents of report.json, in plain values."""
    offline = [
        {
            "query": one.tested.query.id,
            "camera": one.tested.query.camera,
            "task": one.tested.query.task,
            "model": one.tested.query.model,
            **one.evidence.to_json(),
            **one.extra,
            "target": one.tested.query.accuracy_target,
            "threshold": one.tested.threshold,
            "label_interval_s": frame_interval_s(one.tested.footage),
        }
        for one in judged
    ]
    device = {
        "name": profile.name,
        "title": profile.title,
        "modelled": profile.modelled,
        "clock": "virtual clock",
        "sources": list(profile.sources),
    }
    unlabelled = [one.tested.query.id for one in judged if not one.labelled]
    return {
        "workload": bundle.manifest.workload,
        "method": bundle.manifest.method,
        "bundle": {"file": bundle.path.name, "digest": bundle.digest},
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device,
        "seeds": seeds,
        "bytes": {
            **bytes_of(bundle),
            "resident_before": sum(one.original_bytes for one in judged),
            "resident_after": resident_bytes(bundle),
        },
        "shared": shared_of(bundle),
        "offline": offline,
        "streaming": streamed.streaming,
        "ledger": streamed.ledger,
        "swapping": streamed.swapping,
        "timeline": streamed.timeline,
        "caveats": caveats(offline, streamed.swapping, device, unlabelled, len(seeds)),
    }
