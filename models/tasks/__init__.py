"""The tasks by name: what a model's outputs mean, how they are trained, and how they are measured."""

from __future__ import annotations

from typing import Any

from models.predictions import Task
from models.tasks.classification import Classification
from models.tasks.detection import MIN_SCORE as MIN_SCORE
from models.tasks.detection import Detection

_TASKS: dict[str, Any] = {task.name: task for task in (Classification(), Detection())}


def task_of(name: str) -> Task:
    """The task of that name: "classification" or "detection"."""
    return _TASKS[name]
