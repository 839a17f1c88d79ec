"""Offline: which layers to share, and the retraining that keeps accuracy."""

from gemel.merger.config import MergeOptions, TopDownConfig
from gemel.merger.distributed import Resources
from gemel.merger.merge import MergeReport, QueryResult, merge
from gemel.merger.methods.registry import METHODS
from gemel.merger.training.originals import TrainOptions, TrainResult, train_originals
from gemel.merger.training.recipe import Recipe

__all__ = [
    "METHODS",
    "MergeOptions",
    "MergeReport",
    "QueryResult",
    "Recipe",
    "Resources",
    "TopDownConfig",
    "TrainOptions",
    "TrainResult",
    "merge",
    "train_originals",
]
