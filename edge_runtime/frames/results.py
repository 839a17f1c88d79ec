"""Results: one record per answered frame."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any

from edge_runtime.frames.mailbox import Frame
from models.bundle import BundleQuery
from models.predictions import ClassPrediction, Prediction

BUNDLE_DIGITS = 12


@dataclass(frozen=True, slots=True)
class Identity:
    """What every result of a run has in common: the SHA-256 of its bundle, and the run itself.

    Frames are counted anew in each run; (run, query, frame) is never the same twice.
    """

    bundle: str
    run: str = field(default_factory=lambda: secrets.token_hex(8))


def record_of(
    query: BundleQuery, frame: Frame, answer: Prediction, finished_at: float, identity: Identity
) -> dict[str, Any]:
    """The result record as docs/box.md defines it; `finished_at` is in seconds of the clock of `frame.captured_at`.

    captured_at and finished_at of the record are Unix seconds, their difference that of the monotonic clock.
    """
    age_s = finished_at - frame.captured_at
    record: dict[str, Any] = {
        "run": identity.run, "query": query.id, "camera": query.camera, "frame": frame.index,
        "captured_at": round(frame.captured_unix, 6), "finished_at": round(frame.captured_unix + age_s, 6),
        "age_ms": round(age_s * 1000, 3), "late": age_s > query.sla_ms / 1000,
        "bundle": identity.bundle[:BUNDLE_DIGITS],
    }  # fmt: skip
    if isinstance(answer, ClassPrediction):
        return {**record, "label": answer.label, "score": answer.score}
    found = zip(answer.classes, answer.scores, answer.boxes, strict=True)
    detections = [{"class": name, "score": score, "box": list(box)} for name, score, box in found]
    return {**record, "detections": detections}
