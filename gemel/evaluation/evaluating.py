"""What a bundle is worth: offline and streaming accuracy against the originals, bytes, and where frames went."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from edge_runtime.policies import DEFAULT_POLICY
from edge_runtime.schedule.costs import Costs
from edge_runtime.schedule.settings import memory_bytes, memory_settings
from gemel.evaluation.arms import ORIGINALS, Streamed, stream_arms
from gemel.evaluation.asked import LEAST, Asked
from gemel.evaluation.belonging import belonging
from gemel.evaluation.caveats import caveats
from gemel.evaluation.clock import Clock, clock_of
from gemel.evaluation.handing import check_handing, hand_over
from gemel.evaluation.judging import Judged, judge
from gemel.evaluation.streaming import lay_streams
from gemel.evaluation.versions import versions
from gemel.evaluation.wall import walled
from gemel.looking.footprint import bytes_of, resident_bytes, shared_of
from gemel.report.comparing.reading import FORMAT, REPORT_JSON
from gemel.report.page import render
from gemel.text import size
from merger.journal.progress import Progress, Stages, silent
from models.bundle import Bundle
from models.errors import InputError
from models.evaluation import BOOTSTRAP_ROUNDS
from models.io import check_apart, finite, locked, open_atomic
from models.workload import inputs_of, load_workload

MEMORY = (LEAST, "50%", "75%")
JUDGING, STREAMING, PLAYING, HANDING, WRITING = (
    "judging each query on test", "playing the streams", "playing them on this machine", "handing over the frames",
    "writing the report",
)  # fmt: skip
REPORT_HTML = "report.html"
STANDARD = Asked()


def evaluate(
    bundle: str | Path,
    workload: str | Path,
    out_dir: str | Path,
    asked: Asked = STANDARD,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Judge a bundle against the originals of its workload; write `report.json` and `report.html` into `out_dir`.

    Returns the document that report.json holds: DESIGN's keys `offline`, `streaming`, `ledger` and what the page needs
    beside them. Raises InputError, with nothing written, when bundle and workload do not belong together, weights or
    test data are missing or nothing to judge by, or the largest query does not fit the memory.
    """
    out_dir = Path(out_dir)
    load = load_workload(workload)
    opened = belonging(bundle, load)
    written = [("--out", out_dir / name) for name in (REPORT_JSON, REPORT_HTML)]
    check_apart(written, [("the bundle", opened.path), *inputs_of(load)])
    _writable(out_dir)
    check_handing(asked.fiftyone)
    clock = clock_of(asked.device, opened)
    budgets = _budgets(asked.memory, clock.costs[ORIGINALS])
    with locked(out_dir / REPORT_JSON):
        stages = Stages(progress)
        beside = [(PLAYING, asked.wall_s), (HANDING, asked.fiftyone)]
        stages.announce([JUDGING, STREAMING, *(name for name, wanted in beside if wanted), WRITING])
        stages.begin(JUDGING, len(load.queries))
        judged = []
        for query in load.queries:
            progress("evaluate", query=query.id)
            judged.append(judge(query, opened))
            progress("test", query=query.id, ratio=judged[-1].evidence.ratio, target=query.accuracy_target)
            stages.add()
        command = ["gemel", "eval", str(bundle), str(workload), "-o", str(out_dir), *asked.words()]
        document, page = reported(opened, judged, clock, budgets, asked, shlex.join(command), progress)
        _write(out_dir, json.dumps(document, indent=1, allow_nan=False), page)
        return document


def reported(
    bundle: Bundle, judged: Sequence[Judged], clock: Clock, budgets: Mapping[str, int], asked: Asked, command: str,
    progress: Progress = silent,
) -> tuple[dict[str, Any], str]:  # fmt: skip
    """The document and its page, of queries that are scored: the streams are played, frames handed over if asked for.

    `budgets` are the memory settings in bytes, `command` is what was asked in words.
    """
    stages = Stages(progress)
    stages.begin(STREAMING)
    tested, seeds = [one.tested for one in judged], range(asked.seeds)
    streamed = stream_arms(tested, clock.costs, budgets, seeds, progress)
    wall = None
    if asked.wall_s:
        stages.begin(PLAYING)
        wall = _on_the_wall(bundle, judged, budgets[asked.memory], asked.wall_s)
    if asked.fiftyone is not None:
        stages.begin(HANDING)
        hand_over(judged, asked.fiftyone)
    stages.begin(WRITING)
    document = finite({
        **_document(bundle, judged, streamed, clock, asked.seeds),
        "asked": {"memory": asked.memory, "memory_bytes": budgets[asked.memory]},
        "wall": wall,
        "commands": [command],
    })  # fmt: skip
    return document, render(document, [photo for one in judged for photo in one.photos])


def _on_the_wall(bundle: Bundle, judged: Sequence[Judged], budget: int, seconds: float) -> dict[str, Any]:
    tested = [one.tested for one in judged]
    streams = lay_streams({one.query.id: one.footage for one in tested}, seed=0)
    return walled(bundle, tested, {one.tested.query.id: one.split.frames for one in judged}, streams, budget, seconds)


def _write(out_dir: Path, document: str, page: str) -> None:
    """Both files, or neither where there is no room; a name that is no UTF-8 stands there by its escape."""
    with (
        open_atomic(out_dir / REPORT_JSON, overwrite=True) as first,
        open_atomic(out_dir / REPORT_HTML, overwrite=True) as second,
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


def _document(bundle: Bundle, judged: Sequence[Judged], streamed: Streamed, clock: Clock, seeds: int) -> dict[str, Any]:
    """The contents of report.json that do not depend on how it was asked for, in plain values."""
    offline, device = [one.row() for one in judged], dict(clock.told)
    unlabelled = [one.tested.query.id for one in judged if one.split.truths is None]
    return {
        "format": FORMAT,
        "workload": bundle.manifest.workload,
        "method": bundle.manifest.method,
        "bundle": {"file": bundle.path.name, "digest": bundle.digest},
        "created_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": device,
        "seeds": list(range(seeds)),
        "settings": {"policy": DEFAULT_POLICY, "bootstrap_rounds": BOOTSTRAP_ROUNDS, "bootstrap_seed": 0},
        "versions": versions(),
        "costs": clock.rows(),
        "bytes": {
            **bytes_of(bundle),
            "resident_before": sum(one.original_bytes for one in judged),
            "resident_after": resident_bytes(bundle),
        },
        "shared": shared_of(bundle),
        "offline": offline,
        "streaming": streamed.streaming,
        "side_by_side": _side_by_side(offline, streamed.streaming),
        "ledger": streamed.ledger,
        "swapping": streamed.swapping,
        "timeline": streamed.timeline,
        "examples": [example for one in judged for example in one.examples],
        "caveats": caveats(offline, streamed.swapping, device, unlabelled, seeds),
    }


def _side_by_side(offline: Sequence[Mapping[str, Any]], streaming: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of each query in each memory: merged offline, merged streaming, originals streaming."""
    merged = {row["query"]: row["merged"] for row in offline}
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in streaming:
        one = found.setdefault(
            (row["query"], row["memory"]),
            {key: row[key] for key in ("query", "metric", "memory", "memory_bytes")}
            | {"merged_offline": merged[row["query"]]},
        )
        one[f"{row['arm']}_streaming"] = row["accuracy"]
    return list(found.values())
