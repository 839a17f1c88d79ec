"""What models are trained towards, by task: targets, augmentation and losses in torch."""

from __future__ import annotations

from gemel.merger.objectives.base import Objective
from gemel.merger.objectives.boxes import DetectionObjective, KeypointObjective
from gemel.merger.objectives.classes import ClassificationObjective, EmbeddingObjective, MultiLabelObjective
from gemel.merger.objectives.outputs import SegmentationObjective, TensorObjective
from gemel.models.tasks import TaskQuery
from gemel.models.tasks.tensor import AGREEMENTS

_OBJECTIVES: dict[str, Objective] = {
    "classification": ClassificationObjective(),
    "detection": DetectionObjective(),
    "segmentation": SegmentationObjective(),
    "keypoints": KeypointObjective(),
    "embedding": EmbeddingObjective(),
}
_MULTI_LABEL = MultiLabelObjective()
_TENSORS: dict[str | None, Objective] = {by: TensorObjective(by) for by in AGREEMENTS}


def objective_of(query: TaskQuery) -> Objective:
    """The objective of a query."""
    if query.multi_label:
        return _MULTI_LABEL
    return _TENSORS[query.agreement] if query.task == "tensor" else _OBJECTIVES[query.task]
