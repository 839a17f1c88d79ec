"""Motion gating over test frames: how many need no run, and what their answers cost, as on a box."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gemel.edge_runtime.events.motion import DEFAULT_MOTION, MotionConfig, MotionGate
from gemel.models.data import Split
from gemel.models.predictions import Task
from gemel.models.preprocess import WHOLE_FRAME, Region
from gemel.models.tasks import task_of
from gemel.stream_eval import Footage, QueryTest, sampled_positions, units_of


@dataclass(frozen=True)
class GatingResult:
    """Of a query's test frames at its rate: how many a box runs, and the accuracy of all with and without gating."""

    frames: int
    run: int
    ungated: float
    gated: float

    @property
    def still_fraction(self) -> float:
        """The share of frames that are not run."""
        return 1 - self.run / self.frames if self.frames else 0.0


def gate_frames(
    footage: Footage,
    frames: Sequence[np.ndarray],
    region: Region = WHOLE_FRAME,
    config: MotionConfig = DEFAULT_MOTION,
) -> list[tuple[int, int]]:
    """(frame, the frame whose answer it gets) of each frame that a camera at the query's rate delivers.

    Each unit (clip or track) begins anew. `frames` are RGB uint8 (H, W, 3).
    """
    found = []
    for unit in units_of(footage):
        gate, answered = MotionGate(region, config=config), unit[0]
        for position in sampled_positions([footage.times_s[frame] for frame in unit], footage.fps):
            frame = unit[position]
            if not gate.is_still(frame, footage.times_s[frame], frames[frame]):
                gate.confirm(frame)
                answered = frame
            found.append((frame, answered))
    return found


def score_gating(
    task: Task,
    pairs: Sequence[tuple[int, int]],
    predictions: Sequence[Any],
    labels: Sequence[Any],
    classes: Sequence[str],
    threshold: float,
) -> GatingResult:
    """The task's metric over these frames, each with its own answer, and with the one that it gets."""

    def score(answers: Sequence[Any]) -> float:
        own = [labels[frame] for frame, _ in pairs]
        return task.metric_of(task.tallies(answers, own, classes, threshold).sum(axis=0))

    run = sum(frame == answered for frame, answered in pairs)
    ungated = score([predictions[frame] for frame, _ in pairs])
    return GatingResult(len(pairs), run, ungated, score([predictions[answered] for _, answered in pairs]))


def evaluate_gating(test: QueryTest, split: Split, arm: str) -> GatingResult:
    """Gate the test frames of a query, and score the answers of one arm."""
    region = test.query.region if split.labels is None else WHOLE_FRAME  # labelled frames are cut out already
    pairs = gate_frames(test.footage, split.frames, region)
    query = test.query
    return score_gating(task_of(query), pairs, test.predictions[arm], test.labels, query.classes, test.threshold)
