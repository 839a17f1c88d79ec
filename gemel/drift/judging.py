"""What a box answered against what the original of a query answers on the same pictures, and how sure that is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from edge_runtime.spool.checked import BELOW, KEPT, TOO_FEW, UNSURE
from edge_runtime.spool.sample import Head, Sample, read_sample
from models.errors import InputError
from models.tasks import Answer, ClassAnswer, DetectionAnswer, Task, task_of
from models.workload import Query
from models.zoo import preprocess_of

FEWEST = 20
"""Frames with something to compare below which nothing is said."""
ROUNDS = 1000
BATCH = 32


@dataclass(frozen=True)
class Judged:
    """A query on its samples: `frames` that were compared, the `ratio` of its accuracy to its original's with its 95 %
    interval (None where the frames are too few), and the verdict: KEPT, BELOW, UNSURE or TOO_FEW.
    """

    frames: int
    ratio: float | None
    ci95: tuple[float, float] | None
    verdict: str


@dataclass(frozen=True, eq=False)
class Compared:
    """The tally of every sample (`Task.tally`), the original's answer its truth, int64 (N, ...); the agreement that is
    `expected` of a model that is right as often; and how many samples could not be used.
    """

    counts: np.ndarray
    expected: float
    unusable: int


@torch.inference_mode()
def compared(
    query: Query, original: nn.Module, paths: Sequence[Path], told: Callable[[int], object] = lambda frames: None
) -> Compared:
    """The box's answers beside the original's, in the order of the paths; `told` hears how many more were looked at."""
    task, preprocess = task_of(query.task), preprocess_of(query.model, query.input_size)
    device = next(original.parameters()).device
    counts: list[np.ndarray] = []
    expected = 1.0
    for start in range(0, len(paths), BATCH):
        chunk = paths[start : start + BATCH]
        samples = [sample for path in chunk if (sample := _usable(path, query)) is not None]
        if samples:
            batch = torch.stack([preprocess.resize(one.picture) for one in samples]).to(device)
            sizes = [(one.head.size[0], one.head.size[1]) for one in samples]
            answers = task.answers(original, original(preprocess.normalise(batch)), sizes, query.classes)
            for sample, answer in zip(samples, answers, strict=True):
                threshold, expected = sample.head.threshold, sample.head.expected
                truth = task.truth_of(answer, threshold)
                counts.append(task.tally(answer_of(sample.head), truth, query.classes, threshold))
        told(len(chunk))
    return Compared(np.array(counts, np.int64), expected, len(paths) - len(counts))


def answer_of(head: Head) -> Answer:
    """What the box answered, boxes in pixels of the part of the frame that the query looks at."""
    if head.detections is None:
        assert head.label is not None and head.score is not None
        return ClassAnswer(head.label, head.score, ())
    left, top = (0, 0) if head.roi is None else (round(head.roi[0]), round(head.roi[1]))
    found = [(one.name, one.score, one.box) for one in head.detections]
    boxes = tuple((x0 - left, y0 - top, x1 - left, y1 - top) for _, _, (x0, y0, x1, y1) in found)
    return DetectionAnswer(tuple(name for name, _, _ in found), tuple(score for _, score, _ in found), boxes)


def judged(found: Compared, task: Task, target: float, seed: int = 0) -> Judged:
    """The verdict of these tallies, which stand in the order of time.

    The ratio is the metric over what is expected: on the test split of the merge that is the ratio found there, by
    labels or by the original's answers. The interval is a
    bootstrap over blocks of consecutive samples, about the cube root of their number long (Hall, Horowitz and Jing
    1995), since neighbours in time are alike. BELOW: all of the interval lies below the target; UNSURE: the ratio does,
    and not all of the interval. Frames on which neither saw anything count as compared and are no evidence.
    """
    counts, frames = found.counts, len(found.counts)
    if np.count_nonzero(counts.any(axis=tuple(range(1, counts.ndim)))) < FEWEST:
        return Judged(frames, None, None, TOO_FEW)
    blocks = np.array_split(np.arange(frames), frames // round(frames ** (1 / 3)))
    sums = np.stack([counts[block].sum(axis=0) for block in blocks])
    random = np.random.default_rng(seed)
    drawn = [task.metric_of(sums[random.integers(len(sums), size=len(sums))].sum(axis=0)) for _ in range(ROUNDS)]
    low, high = (float(np.quantile(drawn, part)) / found.expected for part in (0.025, 0.975))
    ratio = task.metric_of(counts.sum(axis=0)) / found.expected
    verdict = BELOW if high < target else UNSURE if ratio < target else KEPT
    return Judged(frames, ratio, (low, high), verdict)


def _usable(path: Path, query: Query) -> Sample | None:
    """A sample that this query's original can answer; None for every other."""
    try:
        sample = read_sample(path)
    except InputError:
        return None
    fits: Any = sample.picture.shape == (query.input_size, query.input_size, 3)
    is_class = sample.head.detections is None
    return sample if fits and is_class == (query.task == "classification") else None
