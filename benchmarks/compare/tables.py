"""The tables of docs/compare.md, and the first of the README, from the records of `make compare`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

NAMES = {
    "sessions": "ONNX Runtime, a session a model", "int8": "the same in static int8",
    "openvino": "OpenVINO, a compiled model each", "litserve": "LitServe", "packed": "Gemel, packed",
    "packed-bits": "Gemel, fewest bits, untrained", "box": "Gemel, the whole box", "merged": "Gemel, merged",
    "merged-bits": "Gemel, merged, fewest bits",
}  # fmt: skip
WORKLOADS = {
    "detectors": "twelve YOLOX-nano", "classifiers": "four ResNet-50", "unlike": "six unlike models",
}  # fmt: skip
RATES = ("2", "5", "10")
HEADS = (
    "models", "way", "memory MB", "anonymous MB", "in time at 2", "in time at 5", "in time at 10", "ms a frame",
    "answers as before", "worst query", "set-up min", "files MB", "install MB",
)  # fmt: skip
REPLAY_HEADS = (
    "way", "models that fit", "reloads an hour", "p50 ms", "p50 over all-resident", "p95 ms", "memory MB"
)  # fmt: skip


def compare_rows(records: Mapping[str, Mapping[str, Any]]) -> list[tuple[Any, ...]]:
    """A row for each way of each workload."""
    return [
        (workload, NAMES[way], *_columns(row))
        for name, workload in WORKLOADS.items()
        for way, row in records.get(name, {"rows": {}})["rows"].items()
    ]


def _columns(row: Mapping[str, Any]) -> Sequence[str]:
    agreement = row.get("agreement")
    mean, worst = (f"{100 * fmean(agreement.values()):.1f} %", f"{100 * row['worst']:.1f} %") if agreement else ("", "")
    return (
        f"{row['pss_mb']:.0f}", f"{row['anonymous_mb']:.0f}",
        *(f"{100 * row['in_time'][rate]:.0f} %" for rate in RATES), f"{row['ms_a_frame']:.1f}",
        mean, worst, f"{row['made_s'] / 60:.1f}", f"{row['files_mb']:.0f}", f"{row['install_mb']:.0f}",
    )  # fmt: skip


def replay_rows(record: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A row for each way of the replay."""
    return [
        (
            NAMES[way], f"{row['room']} of 12", str(row["reloads"]), f"{row['p50_ms']:.0f}", f"{row['slowdown']:.2f}",
            f"{row['p95_ms']:.0f}", f"{row['pss_mb']:.0f}",
        )
        for way, row in record["rows"].items()
    ]  # fmt: skip
