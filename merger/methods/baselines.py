"""The method `none`: no search."""

from __future__ import annotations

from gemel.merger.checkpoint import Checkpoint, snapshots
from gemel.merger.config import MergeOptions
from gemel.merger.context import MergeContext, Merged
from gemel.merger.methods.registry import register_method
from gemel.models.sharing.plan import SharingPlan


@register_method("none")
def none(ctx: MergeContext, options: MergeOptions, checkpoint: Checkpoint) -> Merged:
    """The originals, nothing shared."""
    return Merged(SharingPlan(), snapshots(ctx.originals))
