"""What kinds of errors a detector makes, and what each kind costs its F1.

Bolya, Foley, Hays and Hoffman 2020, "TIDE: A General Toolbox for Identifying Object Detection Errors", section 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from models.tasks.f1 import MATCH_IOU, f1_of
from models.tasks.overlaps import NOBODY, Overlaps

CLASS, LOCATION, BOTH, DUPLICATE, BACKGROUND, MISSED = (
    "class", "location", "both", "duplicate", "background", "missed"
)  # fmt: skip
KINDS = (CLASS, LOCATION, BOTH, DUPLICATE, BACKGROUND, MISSED)


@dataclass(frozen=True)
class ErrorType:
    """How often one kind of error was made, and by how much F1 would rise were these alone mended."""

    count: int
    cost: float


def error_types(overlaps: Overlaps, threshold: float) -> dict[str, ErrorType]:
    """Every false alarm of a score from `threshold` on, and every object that none explains, by its kind.

    A false alarm is, by the IoU with what it fits best: LOCATION, MIN_IOU to MATCH_IOU with an object of its class;
    CLASS, MATCH_IOU or more with one of another; DUPLICATE, MATCH_IOU or more with one of its class that a better score
    found; BACKGROUND, below MIN_IOU with all; BOTH, anything else. MISSED are objects that nobody found and no
    error of class or location lies on. To mend one of these two gives its object a detection, where it has none
    yet; to mend an object that was missed takes it away; to mend any other takes the detection away.
    """
    kept, found = overlaps.scores >= threshold, overlaps.matched([MATCH_IOU])[0]
    alarms = kept & (found == NOBODY)
    lacking = np.ones(len(overlaps.object_frames), bool)
    lacking[found[kept & (found != NOBODY)]] = False
    kinds, target = _kinds(overlaps, lacking)
    counts = {kind: int(np.count_nonzero(alarms & (kinds == index))) for index, kind in enumerate(KINDS[:-1])}
    mended = {
        kind: np.intersect1d(target[alarms & (kinds == KINDS.index(kind))], np.flatnonzero(lacking))
        for kind in (CLASS, LOCATION)
    }
    missed = int(np.count_nonzero(lacking)) - len(np.union1d(mended[CLASS], mended[LOCATION]))
    hits, detections, objects = int(np.count_nonzero(~lacking)), int(np.count_nonzero(kept)), len(lacking)
    now = f1_of(np.array([hits, detections, objects]))

    def cost(kind: str) -> float:
        right = len(mended.get(kind, ()))
        gone = counts.get(kind, 0) - right
        there = objects - (missed if kind == MISSED else 0)
        return f1_of(np.array([hits + right, detections - gone, there])) - now

    return {kind: ErrorType(counts.get(kind, missed), cost(kind)) for kind in KINDS}


def _kinds(overlaps: Overlaps, lacking: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each detection, were it a false alarm, the position of its kind in KINDS, and the object it was meant for."""
    size, same = len(overlaps.scores), overlaps.same()
    own, own_at = _best(overlaps, same, size)
    other, other_at = _best(overlaps, ~same, size)
    taken, _ = _best(overlaps, same & ~lacking[overlaps.object], size)
    nearly = (own > 0) & (own < MATCH_IOU)
    choices = {
        LOCATION: nearly, CLASS: other >= MATCH_IOU, DUPLICATE: taken >= MATCH_IOU,
        BACKGROUND: (own == 0) & (other == 0),
    }  # fmt: skip
    kinds = np.select(list(choices.values()), [KINDS.index(kind) for kind in choices], KINDS.index(BOTH))
    return kinds, np.where(nearly, own_at, other_at)


def _best(overlaps: Overlaps, among: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The best IoU of each detection among these pairs, 0 where there is none, and the object it is with."""
    detection, seen, iou = overlaps.detection[among], overlaps.object[among], overlaps.iou[among]
    order = np.argsort(iou, kind="stable")
    best, at = np.zeros(size), np.full(size, NOBODY, np.int64)
    best[detection[order]], at[detection[order]] = iou[order], seen[order]
    return best, at
