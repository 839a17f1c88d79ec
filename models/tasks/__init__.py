"""The tasks by name: what a model's outputs mean, how they are trained, and how they are measured."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from gemel.models.errors import join_names
from gemel.models.plugins import Registry
from gemel.models.predictions import Task, TaskQuery
from gemel.models.tasks.detection import MIN_SCORE as MIN_SCORE

TASKS: Registry[type[Task]] = Registry("gemel.tasks", "task", Task)


def _check_task(name: str) -> str:
    if name not in TASKS:
        raise ValueError(f"there is no such task: choose one of {join_names(TASKS.names, 20)}")
    return name


TaskName = Annotated[str, AfterValidator(_check_task)]


def task_of(query: TaskQuery | str) -> Task:
    """The task of a query, or of that name."""
    if isinstance(query, str):
        return TASKS[query]()
    return TASKS[query.task].of_query(query)
