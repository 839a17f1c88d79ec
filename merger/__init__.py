"""Offline: which layers to share, and the retraining that keeps accuracy."""

from merger import methods as _methods  # noqa: F401  (fills the registry)
from merger.config import MergeOptions, TopDownConfig
from merger.distributed import Resources
from merger.merge import MergeReport, QueryResult, merge
from merger.methods.registry import METHODS
from merger.training.originals import TrainOptions, TrainResult, train_originals
from merger.training.recipe import Recipe

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
