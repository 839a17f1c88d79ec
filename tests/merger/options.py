"""Options under which a merge of the tiny networks takes a second and comes out the same every time."""

from __future__ import annotations

from gemel.merger import MergeOptions, Recipe, TopDownConfig
from gemel.merger.events import Change
from gemel.models.bits import FP32
from gemel.models.measures.evaluation import EvidenceConfig

NETWORKS = (Change.NETWORK, Change.NETWORK_TRAINED, Change.TRUNK)
LAYERS = TopDownConfig(without=NETWORKS)
"""Every query keeps its architecture, so that layers are what is shared."""
QUICK = MergeOptions(
    Recipe(rate=2e-3, epochs=6, batch=16, frames_per_epoch=64),
    precision="fp32",
    accept_unproven=True,
    top_down=LAYERS,
    weights=FP32,
)
ANY_EVIDENCE = EvidenceConfig(min_samples=1, min_clips=1, min_frames=1, competent=False, apart=False)
"""For merges of a few frames that are not about accuracy."""
