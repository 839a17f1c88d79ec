"""The tasks by name: what a model's outputs mean, how they are trained, and how they are measured."""

from __future__ import annotations

from typing import Protocol

from gemel.models.predictions import Task
from gemel.models.tasks.classification import Classification
from gemel.models.tasks.detection import MIN_SCORE as MIN_SCORE
from gemel.models.tasks.detection import Detection
from gemel.models.tasks.embedding import Embedding
from gemel.models.tasks.keypoints import Keypoints
from gemel.models.tasks.multi_label import MultiLabel
from gemel.models.tasks.segmentation import Segmentation
from gemel.models.tasks.tensor import AGREEMENTS, Tensors


class TaskQuery(Protocol):
    """A query of a workload or of a bundle."""

    @property
    def task(self) -> str: ...

    @property
    def multi_label(self) -> bool: ...

    @property
    def agreement(self) -> str | None: ...


_TASKS: dict[str, Task] = {
    task.name: task
    for task in (Classification(), Detection(), Segmentation(), Keypoints(), Embedding(), Tensors("cosine"))
}
_MULTI_LABEL = MultiLabel()
_TENSORS: dict[str | None, Task] = {by: Tensors(by) for by in AGREEMENTS}


def task_of(query: TaskQuery | str) -> Task:
    """The task of a query, or of that name."""
    if isinstance(query, str):
        return _TASKS[query]
    if query.multi_label:
        return _MULTI_LABEL
    return _TENSORS[query.agreement] if query.task == "tensor" else _TASKS[query.task]
