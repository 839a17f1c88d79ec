"""The tables of docs/results.md about a box at work, and a soak's picture, from what was recorded."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.serving.speed import ratio
from gemel.report.geometry import Axis

FAULT_HEADS = ("fault", "how often", "to hold", "measured", "held")
COST_HEADS = ("what", "to hold", "measured")
TRACKING_HEADS = ("tracker", "frames a second", "IDF1", "identity switches", "ms a frame")
EVENT_HEADS = ("boxes of", "zone", "frames a second", "events", "to hold", "precision", "recall", "of each clip")
HELD_OUT_HEADS = (
    "clip", "boxes of", "frames a second", "IDF1", "identity switches", "ms a frame", "events", "precision", "recall"
)  # fmt: skip
GATING_HEADS = ("footage", "threshold", "frames run", "not run", "least F1 of held answers")
MENDED_HEADS = (
    "query", "outcome", "agreement on held-out samples", "ratio on another clip", "verdict there"
)  # fmt: skip
PUSH_HEADS = ("frames by HTTP", "to hold", "measured")
ORDER = (
    "drops", "camera-hangs", "camera-silent", "camera-garbage", "overload", "damage", "sinks", "engine-raises",
    "engine-hangs", "kills", "reload-bad", "reloads", "http",
)  # fmt: skip
"""The rows of the fault table; others follow by name."""
LEFT, TOP, WIDTH, HEIGHT, BOTTOM = 64, 40, 560, 200, 52
MB = 1e6


def fault_rows(found: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """A row for each scenario, with the conditions that did not hold."""
    return [
        (
            one["fault"], f"{one['times']:,} {one['unit']}", one["must"], one["said"],
            "; ".join(["no", *map(_line, one["broken"]), *map(_line, one["slow"])])
            if one["broken"] or one["slow"] else "yes",
        )
        for one in sorted(found, key=lambda one: (_place(one["name"]), one["name"]))
    ]  # fmt: skip


def cost_rows(
    frames: Sequence[Mapping[str, Any]], start: Sequence[Mapping[str, float]], soak: Mapping[str, Any]
) -> list[tuple[str, ...]]:
    """What a box costs beside its queries, how soon it serves, and what it holds after a while."""
    plain, watched = (next(one for one in frames if one["watched"] is is_watched) for is_watched in (False, True))
    bare, box = (median(one[name] for one in start) for name in ("bare_s", "box_s"))
    return [
        ("frames processed of 16 cameras at 5 a second", ">= 95 %", f"{100 * min(1, plain['processed_share']):.1f} %"),
        ("the box's own work, capture, decoding and inference apart", "< 1 ms a frame",
         f"{plain['own_ms_per_frame']:.2f} ms of processor time; {watched['own_ms_per_frame']:.2f} with a dashboard"),
        ("capture and decoding; inference", "", f"{plain['capture_ms_per_frame']:.2f} ms; "
         f"{plain['inference_ms_per_frame']:.2f} ms of processor time a frame"),
        ("HTTP with a dashboard open", "< 5 % of a core", f"{100 * watched['http_core_share']:.1f} %"),
        ("start to first result of 102 MB / `import torch, torchvision`", "<= 1.5",
         f"{box / bare:.2f} ({box:.1f} / {bare:.1f} s); {ratio(start, 'box_cpu_s', 'bare_cpu_s'):.2f} of processor "
         "time"),
        (f"memory, {soak['minutes']:g} minutes with {soak['cameras']} cameras, the first "
         f"{soak['warm_s'] / 60:.1f} left out", "< 1 MB an hour",
         f"{soak['slope_bytes_per_hour'] / MB:+.1f} ± {soak['slope_error'] / MB:.1f} MB an hour; "
         f"threads {soak['threads_more']:+g}, descriptors {soak['descriptors_more']:+g}"),
    ]  # fmt: skip


def push_rows(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Latency, rate and overload of frames that come by HTTP."""
    (found,) = rows
    latency, rate, overload = found["latency_ms"], found["requests_a_second"], found["overload"]
    ledger = overload["ledger"]
    return [
        (f"latency of {found['model']} / ONNX Runtime behind a bare aiohttp handler, alternating", "<= 1.15",
         f"{found['latency_ratio']['paired_median']:.2f} ({latency['box']['median']:.0f} / "
         f"{latency['bare']['median']:.0f} ms)"),
        (f"requests a second of {found['clients']} clients; of the bare handler", "",
         f"{rate['box']:.1f}; {rate['bare']:.1f}"),
        (f"{overload['asked']} requests at four times what it answers, {overload['asked_a_second']:.0f} a second",
         "0 lost",
         f"{overload['lost']} lost: {overload.get('200', 0)} answered, {overload.get('429', 0)} with 429"),
        ("received = processed + dropped + failed + pending, all the run", "equal",
         f"{ledger['received']} = {ledger['processed']} + {sum(ledger['dropped'].values())} + {ledger['failed']} + "
         f"{ledger['pending']}"),
    ]  # fmt: skip


def tracking_rows(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """A row for each tracker and rate."""
    return [
        (one["tracker"], f"{one['fps']:g}", f"{one['idf1']:.3f}", str(one["switches"]), f"{one['ms_median']:.2f}")
        for one in rows
    ]


def event_rows(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """A row for each source of boxes, zone and rate; the target is that of the events of a person's tracks."""
    return [
        (
            one["boxes"], one["zone"], f"{one['fps']:g}", str(one["events"]), ">= 0.9",
            f"{one['precision']:.2f}", f"{one['recall']:.2f}",
            ", ".join(f"{precision:.2f} / {recall:.2f}" for precision, recall in one["clips"]),
        )
        for one in rows
    ]  # fmt: skip


def held_out_rows(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """A row for each clip, source of boxes and rate; with a person's numbers there is no tracker to measure."""
    return [
        (
            one["clip"], one["boxes"], f"{one['fps']:g}",
            *((f"{one['idf1']:.3f}", str(one["switches"]), f"{one['ms']:.2f}") if "idf1" in one else ("-",) * 3),
            str(one["events"]), f"{one['precision']:.2f}", f"{one['recall']:.2f}",
        )
        for one in rows
    ]  # fmt: skip


def gating_rows(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """A row for each kind of footage and threshold, over its clips: frames not run, and the lowest F1 of a clip."""
    kinds = list(dict.fromkeys((one["light"], one["threshold"]) for one in rows))
    found = []
    for light, threshold in kinds:
        own = [one for one in rows if (one["light"], one["threshold"]) == (light, threshold)]
        frames, run = (sum(one[key] for one in own) for key in ("frames", "run"))
        lowest = min(one["f1_own"] for one in own)
        found.append(
            (light, f"{threshold:g}", f"{run} of {frames}", f"{100 - 100 * run / frames:.0f} %", f"{lowest:.3f}")
        )
    return found


def mended_rows(record: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A row for each query: before and after, on held-out samples and on frames of another clip."""
    before, after = (record["elsewhere"].get(name, ()) for name in ("before", "after"))
    rows = []
    for one, first, last in zip(record["mended"]["queries"], before, after or before, strict=True):
        held_out = "" if one["after"] is None else f"{one['before']:.2f} -> {one['after']:.2f}"
        rows.append(
            (one["id"], one["outcome"], held_out, f"{first['ratio']:.2f} -> {last['ratio']:.2f}",
             last["verdict"])
        )  # fmt: skip
    return rows


def soak_picture(soak: Mapping[str, Any]) -> str:
    """Memory over time, and the line through it after the warm-up, as an SVG."""
    samples = [(seconds / 60, held / MB) for seconds, held, *_ in soak["samples"]]
    most = max(held for _, held in samples)
    across = Axis([0.0, samples[-1][0]], _step(samples[-1][0]))
    up = Axis([0.0, 1.1 * most], _step(1.1 * most))
    bottom, parts = TOP + HEIGHT, []
    for value, at in up.ticks():
        y = round(TOP + HEIGHT - at / 100 * HEIGHT, 1)
        parts.append(f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y}" y2="{y}" stroke="#e5e7eb"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{value:.0f}</text>')
    for value, at in across.ticks():
        x = round(LEFT + at / 100 * WIDTH, 1)
        parts.append(f'<line x1="{x}" x2="{x}" y1="{bottom}" y2="{bottom + 4}" stroke="#6b7280"/>')
        parts.append(f'<text x="{x}" y="{bottom + 17}" text-anchor="middle">{value:g}</text>')
    points = [(_x(across, minutes), _y(up, held)) for minutes, held in samples]
    path = "M" + "L".join(f"{x} {y}" for x, y in points)
    parts.append(f'<path d="{path}" fill="none" stroke="#1f6feb" stroke-width="1.5"/>')
    warm, last, slope = soak["warm_s"] / 60, samples[-1][0], soak["slope_bytes_per_hour"] / MB / 60
    kept = [(minutes, held) for minutes, held in samples if minutes >= warm]
    middle_x, middle_y = (sum(values) / len(kept) for values in zip(*kept, strict=True))
    ends = [(_x(across, at), _y(up, middle_y + slope * (at - middle_x))) for at in (warm, last)]
    line = "M" + "L".join(f"{x} {y}" for x, y in ends)
    parts.append(f'<path d="{line}" fill="none" stroke="#c2410c" stroke-width="1.5" stroke-dasharray="6 4"/>')
    parts.append(f'<text x="{LEFT + WIDTH / 2}" y="{bottom + 38}" text-anchor="middle">minutes</text>')
    title = f"{soak['cameras']} looped cameras, {soak['minutes']:g} minutes: memory in MB, {60 * slope:+.1f} MB an hour"
    width, height = LEFT + WIDTH + 24, TOP + HEIGHT + BOTTOM
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>'
        f'<text x="{LEFT}" y="22" font-size="13">{title}</text>' + "".join(parts) + "</svg>\n"
    )


def read(folder: Path) -> list[dict[str, Any]]:
    """What is recorded in a folder."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]


def _place(name: str) -> int:
    return ORDER.index(name) if name in ORDER else len(ORDER)


def _line(text: str) -> str:
    return " ".join(text.split())[:200].replace("|", "/")


def _step(most: float) -> float:
    """A step that gives an axis from 0 some five ticks."""
    return next(step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 5000) if most / step <= 6)


def _x(axis: Axis, value: float) -> float:
    return round(LEFT + axis.at(value) / 100 * WIDTH, 1)


def _y(axis: Axis, value: float) -> float:
    return round(TOP + HEIGHT - axis.at(value) / 100 * HEIGHT, 1)
