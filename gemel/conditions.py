"""The conditions under which a box is tried on paper; nothing heavy is imported for them.

What is asked of a placement; nothing heavy is imported for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DEFAULT_DEVICE = "orin-nano-8gb"
"""The profile that every command takes unless it is told another."""
DEMO_DEVICE = "jetson-nano"
"""The demo's instead: its few small models press nothing larger."""
MEASURED = "measured"
"""Names the costs in BUNDLE.profile.json instead of a profile."""
EVERY_DEVICE = "all"


@dataclass(frozen=True)
class Conditions:
    """What a box is given: memory, a device, a policy.

    `memory` is a size such as 512MiB, or `min`, `50%`, `75%`, `all` of what the originals need. `device` names a
    profile, or is `measured`: the costs in BUNDLE.profile.json; None is measured where that file lies beside the
    bundle, else DEFAULT_DEVICE. A workload's models share nothing, or with `shared` all that they could. With
    `overflow`, queries too large for the memory overflow. `factories` are the `package.module:factory` models of a
    bundle that may be imported, from the current folder or Python's path; a workload's own always may.
    """

    memory: str = "min"
    device: str | None = None
    policy: str = "adaptive"
    shared: bool = False
    overflow: bool = False
    factories: tuple[str, ...] = ()
    seed: int = 0


DEFAULT_CONDITIONS = Conditions()


Objective = Literal["boxes", "frames", "fair"]
Shared = Literal["predicted", "ceiling", "none"]


@dataclass(frozen=True)
class PlacementOptions:
    """`objective` and `shared` as `gemel place` takes them; a better placement is looked for about so many `seconds`.

    `min_frames`: every box has time for this part of the frames that are asked of it, as far as that can be told from
    what runs take; with 0, time does not matter to `boxes`.
    """

    objective: Objective = "boxes"
    shared: Shared = "predicted"
    min_frames: float = 0.0
    seed: int = 0
    seconds: float = 60.0

    @property
    def timed(self) -> bool:
        """Whether what a query's frames take matters."""
        return self.objective != "boxes" or self.min_frames > 0


DEFAULT_PLACEMENT = PlacementOptions()
