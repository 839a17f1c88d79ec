"""Options of plans, simulations and placements. Imports nothing heavy."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

DEFAULT_DEVICE = "orin-nano-8gb"
"""The default device profile of all commands but the demo."""
DEMO_DEVICE = "jetson-nano"
"""The demo's default: its few small models fit a larger device without a swap."""
MEASURED = "measured"
"""Names the costs in BUNDLE.profile.json instead of a profile."""
EVERY_DEVICE = "all"


@dataclass(frozen=True)
class Conditions:
    """A box: memory, device, policy.

    `memory` is a size such as 512MiB, or `min`, `50%`, `75%`, `all` of what the originals need. `device` is a profile,
    or `measured` for the costs in BUNDLE.profile.json; None is `measured` where that file exists, else DEFAULT_DEVICE.
    With `shared`, a workload's models share all layers that they can. With `overflow`, queries too large for the memory
    overflow. `factories` are the `package.module:factory` models of a bundle that may be imported.
    """

    memory: str = "min"
    device: str | None = None
    policy: str = "adaptive"
    shared: bool = False
    overflow: bool = False
    factories: tuple[str, ...] = ()
    seed: int = 0


DEFAULT_CONDITIONS = Conditions()


Objective = Literal["boxes", "watts", "frames", "fair"]
Shared = Literal["predicted", "ceiling", "none"]


@dataclass(frozen=True)
class PlacementOptions:
    """Options of `gemel place`: the solver stops after `seconds`.

    `min_frames`: every box must have time for this fraction of its frames; with 0, time does not matter to `boxes` and
    `watts`. `max_moves`: queries that may leave a box where they are now, None for any number.
    """

    objective: Objective = "boxes"
    shared: Shared = "predicted"
    min_frames: float = 0.0
    seed: int = 0
    seconds: float = 60.0
    max_moves: int | None = None

    @property
    def timed(self) -> bool:
        """Whether run times matter."""
        return self.objective not in ("boxes", "watts") or self.min_frames > 0


DEFAULT_PLACEMENT = PlacementOptions()


def machine_memory_bytes() -> int:
    """All memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
