"""What is asked of a placement; nothing heavy is imported for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Objective = Literal["boxes", "frames", "fair"]
Shared = Literal["predicted", "ceiling", "none"]


@dataclass(frozen=True)
class Asked:
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


STANDARD = Asked()
