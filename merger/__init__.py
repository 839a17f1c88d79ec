"""Offline: which layers to share, and the retraining that keeps accuracy."""

from merger import methods as _methods  # noqa: F401  (fills the registry)
from merger.core.method import METHODS, MergeOptions
from merger.distributed import Resources
from merger.merging import merge
from merger.report import MergeReport, QueryResult
from merger.training.originals import TrainOptions, TrainResult, train_originals
from merger.training.recipe import Recipe

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
