"""The tasks by name: what a model's outputs mean, how they are trained, and how they are measured."""

from __future__ import annotations

from typing import Protocol

from models.predictions import Task
from models.tasks.classification import Classification
from models.tasks.detection import MIN_SCORE as MIN_SCORE
from models.tasks.detection import Detection
from models.tasks.segmentation import Segmentation


class TaskQuery(Protocol):
    """A query of a workload or of a bundle."""

    @property
    def task(self) -> str: ...


_TASKS: dict[str, Task] = {task.name: task for task in (Classification(), Detection(), Segmentation())}


def task_of(query: TaskQuery | str) -> Task:
    """The task of a query, or of that name."""
    return _TASKS[query if isinstance(query, str) else query.task]
