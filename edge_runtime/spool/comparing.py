"""What a box answered beside what another model answers on the same pictures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from edge_runtime.spool.sample import Head, Sample, read_sample
from models.errors import InputError
from models.evaluation import ComparedFrames
from models.predictions import ClassPrediction, DetectionPrediction, Prediction
from models.tasks import task_of

BATCH = 32
Answering = Callable[[Tensor, Sequence[tuple[int, int]]], list[Prediction]]
"""Answers of a model to pictures, uint8 (N, 3, S, S), boxes in pixels of what they were resized from, whose (width,
height) are given.
"""


class Asked(Protocol):
    """What a query of a workload, or of a bundle, says of its answers."""

    @property
    def task(self) -> str: ...
    @property
    def classes(self) -> Sequence[str]: ...
    @property
    def input_size(self) -> int: ...


def compared(
    query: Asked, paths: Sequence[Path], answering: Answering, told: Callable[[int], object] = lambda frames: None
) -> ComparedFrames:
    """The box's answers in these samples beside those of another model, which are their truth, in the order of the
    paths.

    `told` hears how many more were looked at. What is no sample that this query could have left is unusable.
    """
    task = task_of(query.task)
    counts: list[np.ndarray] = []
    expected = 1.0
    for start in range(0, len(paths), BATCH):
        chunk = paths[start : start + BATCH]
        samples = [sample for path in chunk if (sample := _usable(path, query)) is not None]
        if samples:
            batch = torch.stack([torch.from_numpy(one.picture).permute(2, 0, 1) for one in samples])
            answers = answering(batch, [(one.head.size[0], one.head.size[1]) for one in samples])
            for sample, answer in zip(samples, answers, strict=True):
                threshold, expected = sample.head.threshold, sample.head.expected
                truth = task.truth_of(answer, threshold)
                counts.append(task.tallies([answer_of(sample.head)], [truth], query.classes, threshold)[0])
        told(len(chunk))
    return ComparedFrames(np.array(counts, np.int64), expected, len(paths) - len(counts))


def answer_of(head: Head) -> Prediction:
    """What the box answered, boxes in pixels of the part of the frame that the query looks at."""
    if head.detections is None:
        assert head.label is not None and head.score is not None
        return ClassPrediction(head.label, head.score, ())
    left, top = (0, 0) if head.roi is None else (round(head.roi[0]), round(head.roi[1]))
    found = [(one.name, one.score, one.box) for one in head.detections]
    boxes = tuple((x0 - left, y0 - top, x1 - left, y1 - top) for _, _, (x0, y0, x1, y1) in found)
    return DetectionPrediction(tuple(name for name, _, _ in found), tuple(score for _, score, _ in found), boxes)


def _usable(path: Path, query: Asked) -> Sample | None:
    """A sample that this query may have left; None for every other."""
    try:
        sample = read_sample(path)
    except InputError:
        return None
    fits = sample.picture.shape == (query.input_size, query.input_size, 3)
    return sample if fits and (sample.head.detections is None) == (query.task == "classification") else None
