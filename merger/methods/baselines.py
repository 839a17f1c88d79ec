"""The method `none`: no search."""

from __future__ import annotations

from gemel.merger.checkpoint import Checkpoint, snapshots
from gemel.merger.config import MergeOptions
from gemel.merger.context import MergeContext, Merged
from gemel.merger.methods.registry import Method
from gemel.models.sharing.plan import SharingPlan


class NoSharing(Method):
    """The originals, nothing shared."""

    name = "none"
    searches = False
    keeps_donors = True

    def run(self, ctx: MergeContext, options: MergeOptions, checkpoint: Checkpoint) -> Merged:
        """No search."""
        return Merged(SharingPlan(), snapshots(ctx.originals))
