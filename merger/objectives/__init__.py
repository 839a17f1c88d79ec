"""What models are trained towards, by task: targets, augmentation and losses in torch."""

from __future__ import annotations

from gemel.merger.objectives.base import Objective
from gemel.models.plugins import Registry
from gemel.models.predictions import TaskQuery

OBJECTIVES: Registry[type[Objective]] = Registry("gemel.objectives", "objective", Objective)


def objective_of(query: TaskQuery) -> Objective:
    """The objective of a query; InputError where its task has none."""
    return OBJECTIVES.find(query.task, f"the task '{query.task}'").of_query(query)
