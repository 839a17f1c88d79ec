"""Options under which a merge of the tiny networks takes a second and comes out the same every time."""

from __future__ import annotations

from merger import MergeOptions, Recipe
from models.evaluation import EvidenceConfig

QUICK = MergeOptions(Recipe(rate=2e-3, epochs=6, batch=16), precision="fp32", margin=0.5)
ANY_EVIDENCE = EvidenceConfig(min_samples=1, min_clips=1)
"""For merges of a few frames that are not about accuracy."""
