"""What a mover has made ready before it goes over to another store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Fresh:
    """A way into the other store, and memory (as engines and as the CPU see it) where there is to be other.

    `capacity_bytes` is how much that is; where it is not there yet, contents are lost.
    """

    source: Any
    capacity_bytes: int | None = None
    memory: tuple[Tensor, np.ndarray] | None = None

    @property
    def keeps(self) -> bool:
        """Whether what is in memory can stay."""
        return self.capacity_bytes is None or self.memory is not None
