"""Tasks by name."""

from __future__ import annotations

from typing import Any

from models.tasks.base import Answer, Boxes, ClassAnswer, DetectionAnswer, Task, Truth
from models.tasks.classification import Classification
from models.tasks.detection import Detection

__all__ = ["Answer", "Boxes", "ClassAnswer", "DetectionAnswer", "Task", "Truth", "task_of"]

_TASKS: dict[str, Any] = {task.name: task for task in (Classification(), Detection())}


def task_of(name: str) -> Task:
    """The task of that name: "classification" or "detection"."""
    return _TASKS[name]
