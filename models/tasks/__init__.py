"""The tasks by name: what a model's outputs mean, how they are trained, and how they are measured."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from gemel.models.plugins import Registry, entry_check
from gemel.models.predictions import Task, TaskQuery
from gemel.models.tasks.detection import MIN_SCORE as MIN_SCORE

TASKS: Registry[type[Task]] = Registry("gemel.tasks", "task", Task)


TaskName = Annotated[str, AfterValidator(entry_check("gemel.tasks"))]


def task_of(query: TaskQuery | str) -> Task:
    """The task of a query, or of that name."""
    if isinstance(query, str):
        return TASKS[query]()
    return TASKS[query.task].of_query(query)
