"""Which part of a model's answers stayed: outputs of a way beside those of plain sessions, read as the file says."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gemel.models.decoders.files import ModelFile
from gemel.models.decoders.graph_model import GraphClassifier
from gemel.models.detector import read_outputs
from gemel.models.tasks import task_of

MIN_SCORE = 0.25


@cache
def read_file(path: Path) -> tuple[ModelFile, Any]:
    """A file described, and its model, of which only what reads the outputs is used."""
    file = ModelFile(path).complete()
    return file, file.build()


def predict(path: Path, outputs: list[list[np.ndarray]]) -> list[Any]:
    """The predictions of frames from the outputs of each."""
    file, model = read_file(path)
    heads = model.head.outputs
    rows = [[np.reshape(value, head.shape)[None] for value, head in zip(frame, heads, strict=True)]
            for frame in outputs]  # fmt: skip
    answers: Any = tuple(torch.from_numpy(np.concatenate(same).astype(np.float32)) for same in zip(*rows, strict=True))
    if isinstance(model, GraphClassifier):
        answers = model.logits.answer(answers)
    sizes, preprocess = [(1000, 1000)] * len(outputs), file.preprocess()
    with torch.inference_mode():
        return read_outputs(task_of(str(file.task)), model, answers, sizes, file.classes, MIN_SCORE, preprocess)


def agreements(files: Mapping[str, str], plain: Path, way: Path) -> dict[str, float]:
    """For each model the agreement of its task with the plain session's answers, from two .npz of outputs."""
    scores = {}
    with np.load(plain) as before, np.load(way) as after:
        for name, path in files.items():
            predictions = [predict(Path(path), outputs_of(arrays, name)) for arrays in (before, after)]
            task = task_of(str(read_file(Path(path))[0].task))
            threshold = MIN_SCORE if task.has_threshold else 0.0
            labels = [task.labels_of(prediction, threshold) for prediction in predictions[0]]
            tallies = task.tallies(predictions[1], labels, read_file(Path(path))[0].classes, threshold)
            scores[name] = round(float(task.metric_of(tallies.sum(axis=0))), 4)
    return scores


def outputs_of(arrays: Any, model: str) -> list[list[np.ndarray]]:
    """The outputs of each frame of a model, in order."""
    keys = sorted(tuple(map(int, key.split("/")[1:])) for key in arrays.files if key.split("/")[0] == model)
    frames: dict[int, list[np.ndarray]] = {}
    for frame, place in keys:
        frames.setdefault(frame, []).append(arrays[f"{model}/{frame}/{place}"])
    return list(frames.values())
