"""How tests of what goes past the ceiling try a step: options that take a second, and one search or ladder."""

from __future__ import annotations

import math
from pathlib import Path

from merger.bench.bounds import Bounds
from merger.bench.merged import Merged
from merger.bench.method import MergeOptions
from merger.bench.workbench import Workbench
from merger.beyond.candidates import Candidate, low_rank
from merger.beyond.trying import Trying
from merger.journal.checkpoint import Checkpoint
from merger.training.recipe import Recipe

RECIPE = Recipe(rate=2e-3, epochs=2, batch=16, features=1.0)
OPTIONS = MergeOptions(RECIPE, choose_rate=False, precision="fp32", beyond=True)


def trying(bench: Workbench, folder: Path, required: float, most_work: float = math.inf) -> Trying:
    """Tries with this much required of every query."""
    bounds = Bounds(bench.work, most_work)
    return Trying(bench, RECIPE, dict.fromkeys(bench.queries, required), Checkpoint(folder, {}, False), bounds)


def ladder_of(path: str, bench: Workbench, merged: Merged) -> list[Candidate]:
    """The candidates for factors of the layer at this path."""
    ladders = low_rank(bench.layers, bench.originals, merged.plan, 0)
    return next(ladder for ladder in ladders if {own for _, own in ladder[0].first} == {path})
