"""Offline: which layers to share, and the retraining that keeps accuracy."""

from merger import methods as _methods  # noqa: F401  (fills the registry)
from merger.merging import MergeReport, QueryResult, merge
from merger.method import METHODS, MergeOptions
from merger.originals import TrainOptions, TrainResult, train_originals
from merger.training import Recipe
from merger.workers_choice import Resources

__all__ = [
    "METHODS",
    "MergeOptions",
    "MergeReport",
    "QueryResult",
    "Recipe",
    "Resources",
    "TrainOptions",
    "TrainResult",
    "merge",
    "train_originals",
]
